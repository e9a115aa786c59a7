"""`/v1/rag/collections`."""

from fastapi import Request, Response

from gateway.http.rag.exchange import collection_key, json_response, parsed_body
from gateway.http.rag.objects import collection_object, list_object
from gateway.http.rag.schemas import CollectionRequest
from gateway.options.http import HttpOptions
from pipelines.rag.library import Library


class CollectionRoutes:
    """The handlers of collections over one library."""

    def __init__(self, library: Library, options: HttpOptions) -> None:
        self._library = library
        self._options = options

    async def list_all(self) -> Response:
        """All collections: their names and sizes are no secret."""
        return json_response(list_object([collection_object(info) for info in await self._library.collections()]))

    async def create(self, request: Request) -> Response:
        """Make an empty collection, owned by the key in x-sluice-collection-key where there is one."""
        fields, headers = await parsed_body(request, CollectionRequest, self._options)
        info = await self._library.create_collection(fields.name, fields.encoder or "", collection_key(request))
        return json_response(collection_object(info), 201, headers)

    async def get(self, request: Request, name: str) -> Response:
        """One collection."""
        return json_response(collection_object(await self._library.collection(name, collection_key(request))))

    async def delete(self, request: Request, name: str) -> Response:
        """Delete a collection with all that it holds."""
        await self._library.delete_collection(name, collection_key(request))
        return json_response({"name": name, "object": "collection", "deleted": True})
