"""`pegainfer run-batch`: a file of requests, answered by the routes without a socket."""
