"""A Starlette server behind slowapi: slowapi_server.py PORT COUNT SECONDS STRATEGY LOG"""

import sys
import time

import uvicorn
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

port, count, seconds, strategy, file = sys.argv[1:]
log = open(file, "a", buffering=1)
limiter = Limiter(key_func=get_remote_address, strategy=strategy, headers_enabled=True)


@limiter.limit(f"{count} per {seconds} second")
async def home(request):
    return PlainTextResponse("ok")


app = Starlette(routes=[Route("/", home)])
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


async def logged(scope, receive, send):
    at = int(time.time() * 1000)

    async def note(message):
        if message["type"] == "http.response.start":
            log.write(f"{message['status']} {at}\n")
        await send(message)

    await app(scope, receive, note)


uvicorn.run(logged, host="127.0.0.1", port=int(port), log_level="error", access_log=False, timeout_keep_alive=3600)
