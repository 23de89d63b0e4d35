import lib.interrupt  # noqa: F401
