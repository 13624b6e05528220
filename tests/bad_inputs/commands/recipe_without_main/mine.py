"""A recipe that lost its main."""


def mian(argv):
    return 0
