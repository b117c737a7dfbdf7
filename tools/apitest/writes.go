package apitest

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"k8s.io/client-go/rest"
)

// Writes remembers what a client asked an API server to change, Leases apart: they are renewed for ever.
type Writes struct {
	mu   sync.Mutex
	list []string
}

// CountWrites makes clients of config report their writes.
func CountWrites(config *rest.Config) *Writes {
	w := &Writes{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return recorder{w, next} })
	return w
}

// Take returns the writes since the last call, as "METHOD path".
func (w *Writes) Take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	taken := w.list
	w.list = nil
	slices.Sort(taken)
	return taken
}

type recorder struct {
	writes *Writes
	next   http.RoundTripper
}

func (r recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet && !strings.Contains(req.URL.Path, "/leases") {
		r.writes.mu.Lock()
		r.writes.list = append(r.writes.list, fmt.Sprintf("%s %s", req.Method, req.URL.Path))
		r.writes.mu.Unlock()
	}
	return r.next.RoundTrip(req)
}
