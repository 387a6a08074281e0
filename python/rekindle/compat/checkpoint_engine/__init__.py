"""checkpoint-engine's protocol and `ParameterServer`, with weights from Rekindle's copies.

`send` feeds one worker of an engine that receives by checkpoint-engine's `update_weights_from_ipc`.
`serve_to` feeds all workers of an engine on this host, and asks the engine over HTTP to receive.
`ParameterServer` replaces `checkpoint_engine.ps.ParameterServer`.

This is the one place where Rekindle uses pickle, because the protocol does: it pickles its
messages, and the engine's worker unpickles them. It unpickles nothing that it receives. Sockets are
files in directories that only this user can enter; see docs/guides/checkpoint-engine.md.

Needs torch and pyzmq (`pip install pyzmq`). `ParameterServer` also needs safetensors.
"""
from .channel import ReceiverEndedError, ReceiverError, ReceiverLostError
from .engines import request_inference_to_update
from .exchange import RankError
from .parameter_server import ParameterServer
from .sender import send
from .serve import Served, serve_to

__all__ = ["ParameterServer", "RankError", "ReceiverEndedError", "ReceiverError",
           "ReceiverLostError", "Served", "request_inference_to_update", "send", "serve_to"]
