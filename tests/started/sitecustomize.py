"""Read by every Python that tests start, as its folder is on PYTHONPATH: the garbage collector comes less often, as in
conftest.py. Else it would take a fifth of the time in which a process imports torch."""

import gc

gc.set_threshold(10_000, 10, 20)
