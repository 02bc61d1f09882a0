from tests.workers.conftest import allows_sandbox

__all__ = ["allows_sandbox"]
