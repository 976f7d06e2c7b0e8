"""The API's own description: an OpenAPI document made from the types that requests are decoded into."""
