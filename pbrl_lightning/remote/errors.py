"""What can go wrong with a remote model."""

from __future__ import annotations

from pbrl_lightning.utils.errors import RunError


class ApiError(RunError):
    """A request to a remote model failed; its message holds no key.

    Attributes:
        endpoint: The address without its query.
        status: The HTTP status, None where there was no answer.
    """

    def __init__(self, message: str, *, endpoint: str, status: int | None = None) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.status = status


class ApiRejectedError(ApiError):
    """The endpoint refuses such requests (a wrong key, no balance, a wrong option …): asking again is of no use."""


class ApiUnavailableError(ApiError):
    """No usable answer came within the attempts and the deadline."""
