"""Read by every Python that tests start, as its folder is on PYTHONPATH: the garbage collector comes less often, as in
conftest.py. Else it would take a fifth of the time in which a process imports torch.

Ray's setup_worker.py imports all of Ray to learn the command that starts a worker: here that of forked_workers.py.
"""

import gc
import json
import os
import sys

gc.set_threshold(10_000, 10, 20)

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language=PYTHON"
_given = sys.orig_argv[1:]
if _given and _given[0].endswith("ray/_private/workers/setup_worker.py") and _LANGUAGE in _given:
    _context = next((json.loads(each[len(_CONTEXT) :]) for each in _given if each.startswith(_CONTEXT)), {})
    if "forked_workers" in _context.get("py_executable", ""):
        os.environ |= _context.get("env_vars", {})
        _rest = [each for each in _given[1:] if each != _LANGUAGE and not each.startswith(_CONTEXT)]
        _command = [*_context["py_executable"].split(), *_rest]
        os.execv(_command[0], _command)
