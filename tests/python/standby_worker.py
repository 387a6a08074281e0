"""A worker as users write it: it knows nothing of standbys. It says what it does on stdout."""
import os
import signal
import sys
import time

import rekindle

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("started", os.getpid(), flush=True)
if "explicit" in sys.argv:
    print("waited", os.getpid(), rekindle.standby.wait(60), rekindle.standby.wait(), flush=True)
with rekindle.attach() as session:
    for _ in session:
        pass
    session.commit()
    print("ready", os.getpid(), os.environ["REKINDLE_FAILURES"], os.environ.get("REKINDLE_STANDBY"),
          flush=True)
    while True:
        time.sleep(3600)
