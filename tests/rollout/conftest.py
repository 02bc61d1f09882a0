from tests.live_servers import backend, client, serve_engine, server_url, tool_tokenizer

__all__ = ["backend", "client", "serve_engine", "server_url", "tool_tokenizer"]
