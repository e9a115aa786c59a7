"""A fleet on this machine under mixed traffic and faults, in which every accepted request is accounted for."""
