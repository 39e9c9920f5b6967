"""The values that the agent sends to the api, and the errors with which both answer."""
