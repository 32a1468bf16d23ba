# SPDX-License-Identifier: Apache-2.0
"""The server of the gateway: keys, limits, scores, disconnects and its end."""

import logging
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gateway_backend import KEY, SECONDS, Planned, said

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from evoalign.errors import ConfigError
from evoalign.gateway.chat import RefusedError
from evoalign.gateway.server import Server

PATHS = ("chat/completions", "responses", "messages")
BEARER = {"Authorization": f"Bearer {KEY}"}
SECRET = "zqxsecrettext"
BODY = {"model": "m", "input": SECRET}


def post(server, path="responses", body=BODY, headers=BEARER, **more):
    return httpx.post(f"{server.url}/{path}", json=body, headers=headers, timeout=SECONDS, **more)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "evoalign-gateway"]


def error_of(path, answer):
    """Return type and message of an error in the form of the path's API."""
    found = answer.json()
    assert (found.get("type") == "error") == (path == "messages")
    assert path == "messages" or found["error"].keys() == {"message", "type", "param", "code"}
    return found["error"]["type"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"x-api-key": "other"}, {"x-api-key": ""}])
def test_unknown_keys_are_refused_in_the_form_of_the_api(path, headers):
    with Server(Planned()) as server:
        answer = post(server, path, {}, headers)
    assert answer.status_code == 401
    assert error_of(path, answer) == ("authentication_error" if path == "messages" else "invalid_request_error")


def test_unknown_key_is_refused_before_the_body_is_read():
    with Server(Planned()) as server, socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
        connection.settimeout(SECONDS)
        head = "POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\nContent-Type: application/json"
        connection.sendall(f"{head}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("headers", [BEARER, {"x-api-key": KEY}, {"Authorization": f"bearer {KEY}", "x-api-key": "no"}])
def test_known_keys_are_accepted(headers):
    backend = Planned([said("Hello")])
    with Server(backend) as server:
        assert post(server, headers=headers).status_code == 200
    assert backend.keys == [KEY]


def test_token_is_the_first_part_of_keys():
    backend = Planned([said("Hello")])
    with Server(backend, token="of-the-server") as server:
        assert post(server).status_code == 401
        assert post(server, headers={"x-api-key": f"of-the-servex.{KEY}"}).status_code == 401
        assert post(server, headers={"x-api-key": f"of-the-server.{KEY}"}).status_code == 200
    assert backend.keys == [KEY]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("status", "code"), [(400, "context_length_exceeded"), (429, "insufficient_quota"), (503, "c")]
)
def test_refusals_of_the_backend_keep_status_and_code(path, status, code):
    body = {"model": "m"} | (
        {"input": "a"} if path == "responses" else {"messages": [{"role": "user", "content": "a"}]}
    )
    with Server(Planned(RefusedError("too much", status, code))) as server:
        answer = post(server, path, body)
    assert answer.status_code == status and answer.headers["x-should-retry"] == "false"
    assert error_of(path, answer) and "too much" in answer.json()["error"]["message"]
    if path != "messages":
        assert answer.json()["error"]["code"] == code
    elif status == 400:
        assert "prompt is too long" in answer.json()["error"]["message"]


def test_other_errors_and_logs_have_neither_texts_nor_keys(caplog):
    caplog.set_level(logging.DEBUG)
    with Server(Planned(ValueError(SECRET), [said(SECRET)])) as server:
        answer = post(server)
        assert answer.status_code == 500 and SECRET not in answer.text
        assert post(server).status_code == 200
        assert post(server, body=BODY | {SECRET: SECRET}).status_code == 400
        assert httpx.get(f"{server.url}/{SECRET}?{SECRET}", headers=BEARER).status_code == 404
        assert post(server, headers={"x-api-key": SECRET}).status_code == 401
    ours = [f"{record.getMessage()} {record.exc_text}" for record in caplog.records if record.name[:4] not in ("http",)]
    assert any("ValueError" in line for line in ours)
    assert not any(SECRET in line or KEY in line for line in ours)


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies_are_refused(path):
    with Server(Planned(), max_body=1000) as server:
        answer = post(server, path, {"model": "m" * 2000})
    assert answer.status_code == 413 and error_of(path, answer)


def test_one_key_has_a_limit_of_requests_at_a_time():
    backend = Planned()
    with ThreadPoolExecutor(2) as pool, Server(backend, most_requests=2) as server:
        waiting = [pool.submit(post, server) for _ in range(2)]
        assert all(backend.waits.acquire(timeout=SECONDS) for _ in waiting)
        answer = post(server, "messages", {})
        assert answer.status_code == 429 and error_of("messages", answer) == "rate_limit_error"
        assert "x-should-retry" not in answer.headers and answer.headers["Retry-After"]
        assert httpx.get(server.url.removesuffix("/v1") + "/health").status_code == 200


def test_only_own_host_names_paths_and_methods():
    with Server(Planned()) as server:
        for name, status in (("evil.example", 421), ("localhost:5", 200), ("[::1]", 200)):
            assert httpx.get(f"{server.url}/models", headers=BEARER | {"Host": name}).status_code == status, name
        assert httpx.get(f"{server.url}/models").status_code == 401
        assert httpx.get(f"{server.url}/responses", headers=BEARER).status_code == 405
        assert httpx.post(f"{server.url}/responses", headers=BEARER, content=b"{}").status_code == 415
        assert httpx.get(f"{server.url}/models", headers=BEARER).json()["data"][0]["id"]


@pytest.mark.parametrize("scores", [{"reward": 0.5}, {"reward": 1, "cost": -2.5}])
def test_scores_reach_the_backend(scores):
    backend = Planned()
    with Server(backend) as server:
        assert post(server, "score", scores).status_code == 200
    assert backend.scores == [scores] and backend.keys == [KEY]


@pytest.mark.parametrize("scores", [
    {}, {"reward": None}, {"reward": "1"}, {"reward": True}, {"reward": [1]}, {"reward": 10**400}, {"a b": 1}, {"": 1},
    {f"r{i}": 1 for i in range(100)},
])  # fmt: skip
def test_scores_other_than_named_finite_numbers_are_refused(scores):
    backend = Planned()
    with Server(backend) as server:
        assert post(server, "score", scores).status_code == 400
    assert backend.scores == []


@pytest.mark.parametrize("is_streamed", [False, True])
def test_disconnect_cancels_the_completion(is_streamed):
    backend = Planned()
    with Server(backend, most_requests=1) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/responses", json=BODY | {"stream": is_streamed}, headers=BEARER, timeout=0.5)
        assert backend.waits.acquire(timeout=SECONDS) and backend.cancelled.wait(SECONDS)
        backend.plan.append([said("Hello")])
        until = time.monotonic() + SECONDS
        while (status := post(server).status_code) == 429 and time.monotonic() < until:
            time.sleep(0.05)
        assert status == 200, "the place of the request is free again"


@pytest.mark.parametrize("path", PATHS)
def test_close_ends_pending_requests_with_503_and_leaves_no_thread(path):
    backend = Planned()
    body = {"model": "m"} | (
        {"input": "a"} if path == "responses" else {"messages": [{"role": "user", "content": "a"}]}
    )
    with ThreadPoolExecutor(1) as pool, httpx.Client() as idle:
        with Server(backend) as server:
            assert idle.get(f"{server.url}/models", headers=BEARER).status_code == 200
            with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as half:
                half.sendall(b"POST /v1/respo")
                pending = pool.submit(post, server, path, body)
                assert backend.waits.acquire(timeout=SECONDS) and threads()
                begun = time.monotonic()
                server.__exit__(None, None, None)
                assert time.monotonic() - begun < 10
        answer = pending.result(SECONDS)
    assert answer.status_code == 503 and error_of(path, answer) and backend.cancelled.wait(SECONDS)
    assert not threads()
    with pytest.raises(httpx.ConnectError):
        post(server)


def test_close_does_not_wait_for_half_a_body():
    with Server(Planned()) as server:
        port = httpx.URL(server.url).port
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\nx-api-key: {KEY}"
            connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{{".encode())
            begun = time.monotonic()
            server.__exit__(None, None, None)
    assert time.monotonic() - begun < 10 and not threads()


def test_several_servers_run_at_a_time():
    first, second = Planned([said("1")]), Planned([said("2")])
    with Server(first) as one, Server(second) as two:
        assert one.url != two.url and post(one).status_code == post(two).status_code == 200
    assert len(first.chats) == len(second.chats) == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
            check=True, capture_output=True, timeout=SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no openssl that makes certificates")
    return files


def test_other_addresses_need_a_token_and_a_certificate(certificate, tmp_path):
    cert, key = certificate
    for more in ({}, {"token": "of-the-server"}, {"certfile": cert, "keyfile": key}):
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
            Server(Planned(), "0.0.0.0", **more)
    with pytest.raises(ConfigError, match="keyfile"):
        Server(Planned(), certfile=cert)
    with pytest.raises(ConfigError, match="certfile"), Server(Planned(), certfile=tmp_path / "no", keyfile=key):
        pass
    with Server(Planned([said("a")]), "0.0.0.0", token="of-the-server", certfile=cert, keyfile=key) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        headers, trusted = {"x-api-key": f"of-the-server.{KEY}"}, ssl.create_default_context(cafile=cert)
        answer = httpx.post(f"{url}/responses", json=BODY, headers=headers, verify=trusted, timeout=SECONDS)
        assert answer.status_code == 200


def test_port_in_use_is_a_config_error():
    with Server(Planned()) as server:
        port = httpx.URL(server.url).port
        with pytest.raises(ConfigError, match=str(port)), Server(Planned(), port=port):
            pass
