"""The coordinator: a Dynamo component that binds sessions to decode workers and routes every round."""
