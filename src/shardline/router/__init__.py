"""The process in front of servers: one address for many backends, of any make that speaks the OpenAI API."""
