"""The engine of first_token.py: a Llama model of transformers behind HTTP, on `GET /token`.

    first_token_engine.py CONFIG-JSON DEVICE PORT RESIDENT
"""
import http.server
import sys

import torch
import transformers

import rekindle.torch

config, device, port, resident = sys.argv[1:5]
on = torch.device("cpu") if device.startswith("double:") else torch.device(device)
# The device is up before the weights come, also in a standby.
torch.zeros(1, device=on)
settings = transformers.LlamaConfig.from_json_file(config)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM._from_config(settings, dtype=torch.bfloat16).eval()
# Waits here in a standby.
session = rekindle.torch.load(model, device=device, resident=resident == "yes")
session.commit()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        prompt = torch.tensor([[1, 2, 3]], device=on)
        with torch.inference_mode():
            token = int(model.generate(prompt, max_new_tokens=1, do_sample=False)[0, -1])
        answer = f"{token} {session.rung}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


http.server.HTTPServer.allow_reuse_address = True
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
