"""The failures of tuning."""


class TuneError(Exception):
    """The tuning cannot begin or go on. The message is for the user."""


class TrialFailedError(Exception):
    """One point could not be measured: its server did not start, or requests failed. The search goes on."""
