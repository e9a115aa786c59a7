"""The engine as a worker of NVIDIA Dynamo: its front end and its router in place of our gateway."""
