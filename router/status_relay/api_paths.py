"""The paths of the APIs, as Dynamo's frontend has them."""

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
