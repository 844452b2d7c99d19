// Swagger UI on our own description of the requests. Nothing is validated or loaded elsewhere.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#requests", validatorUrl: null, deepLinking: true });
