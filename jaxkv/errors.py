"""The exceptions that a caller may want to catch apart from ValueError."""


class JaxkvError(Exception):
    """The root of jaxkv's own exceptions."""


class CapacityError(JaxkvError, ValueError):
    """A request could not fit even into an empty cache."""


class StalePlanError(JaxkvError, RuntimeError):
    """A step was planned against a state that the cache no longer has."""


class ClosedRequestError(JaxkvError, RuntimeError):
    """A request was used after it had been closed."""


class PageAccountingError(JaxkvError, RuntimeError):
    """A page would be freed twice, freed unallocated, or shared unallocated."""
