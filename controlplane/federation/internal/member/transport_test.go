package member

import (
	"context"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Lists are compressed, and so are the watches of kinds with many objects. Those of others would cost more memory than they save.
func TestCompression(t *testing.T) {
	asked := make(chan string, 1)
	server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r.Header.Get("Accept-Encoding") }))
	t.Cleanup(server.Close)
	tr := transport{verify: func(context.Context, func(*http.Request) (*http.Response, error)) error { return nil }}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := tr.set(Target{Server: server.URL, Token: "t", CA: string(ca)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.unset)
	for path, want := range map[string]string{
		"/apis/discovery.k8s.io/v1/endpointslices?watch=true": "gzip", "/api/v1/services?watch=true": "gzip",
		"/api/v1/namespaces?watch=true": "identity", "/apis/networking.k8s.io/v1/networkpolicies?allowWatchBookmarks=true&watch=true": "identity",
		"/api/v1/namespaces": "gzip", "/api/v1/namespaces?watch=false": "gzip",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if got := <-asked; got != want {
			t.Errorf("%s asks for %q, want %q", path, got, want)
		}
	}
}
