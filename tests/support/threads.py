"""Torch's threads in tests: one, or as many as TEST_THREADS says.

With one thread, distributed cases do not fight for cores, and the default suite stays short. With
two or more, the suites show that an identity of bits does not rest on a single thread.
"""

import os

THREADS = int(os.environ.get("TEST_THREADS", "1"))
