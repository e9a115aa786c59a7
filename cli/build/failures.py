"""Why a build cannot be made, or did not come to its end."""


class BuildError(Exception):
    """The text is for the operator: what is wrong, and what to do."""


class AskedError(BuildError):
    """Something was asked that cannot be had: another command line is needed."""
