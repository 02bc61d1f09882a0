"""Agents: whole episodes of programs that know only an OpenAI address, which the trainer gives each of them."""
