"""An MCP server over stdio, with one tool."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("adding")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


if __name__ == "__main__":
    server.run("stdio")
