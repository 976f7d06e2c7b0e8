"""The routes, except those of Responses, Messages and the API documentation, which have folders."""
