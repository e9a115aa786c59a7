"""HTTP workers: whole servers that share the ports of one host process, which has the engines and the control."""
