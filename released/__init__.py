import lib.first  # noqa: F401
