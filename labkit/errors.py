"""The errors a learner may meet: what was given, what is needed, what to do."""


class LabError(ValueError):
    """Something the learner can put right; the message says how."""
