"""/v1/responses: OpenAI's newer endpoint for conversations, whose answers the server can keep."""
