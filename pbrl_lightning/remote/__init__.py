"""Models behind HTTP: comparators and judges ask them through one client."""

from pbrl_lightning.remote.client import ApiClient
from pbrl_lightning.remote.endpoint import ApiEndpoint
from pbrl_lightning.remote.errors import ApiError, ApiRejectedError, ApiUnavailableError
from pbrl_lightning.remote.formats import ApiRequest

__all__ = ["ApiClient", "ApiEndpoint", "ApiError", "ApiRejectedError", "ApiRequest", "ApiUnavailableError"]
