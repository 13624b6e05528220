"""A recipe with a slip of the pen."""


def main(argv)
    return 0
