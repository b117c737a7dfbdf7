package neutron_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path"
	"strings"
	"sync"
)

// errDead is what a dead controller hears.
var errDead = errors.New("killed")

// wire is all that a controller says to its API server and to Neutron. It dies at one of its requests, of whatever kind, and
// from then on nothing is said any more.
type wire struct {
	dead chan struct{} // closed

	mu    sync.Mutex
	left  int  // requests until it dies, that one included; 0: it does not
	after bool // the last request still has its effect, and the answer is lost
	wrote map[string]bool
}

// newWire returns one that notes in wrote the objects of Neutron that it created, changed or deleted, or tried to, by id.
func newWire(wrote map[string]bool) *wire { return &wire{dead: make(chan struct{}), wrote: wrote} }

// dieAt lets it die at the nth request from now on; 0: not at all.
func (w *wire) dieAt(n int, after bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left, w.after = n, after
}

// kubernetes is the part to the API server, neutron that to Neutron.
func (w *wire) kubernetes(to http.RoundTripper) http.RoundTripper { return hop{w, to, false} }
func (w *wire) neutron(to http.RoundTripper) http.RoundTripper    { return hop{w, to, true} }

// hop is one of the two.
type hop struct {
	*wire
	to    http.RoundTripper
	notes bool // what is written
}

// RoundTrip is that of http.RoundTripper.
func (h hop) RoundTrip(r *http.Request) (*http.Response, error) {
	dies, reaches := h.count(r)
	if !reaches {
		return nil, errDead
	}
	resp, err := h.to.RoundTrip(r)
	if err == nil && h.notes && r.Method != http.MethodGet {
		err = h.note(r, resp)
	}
	if !dies {
		return resp, err
	}
	if err == nil {
		_ = resp.Body.Close()
	}
	close(h.dead)
	return nil, errDead
}

// count reports whether the wire dies with a request, and whether that still has its effect. The Lease is renewed all the
// time: it is no moment of its own.
func (h hop) count(r *http.Request) (dies, reaches bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.dead:
		return false, false
	default:
	}
	if h.left == 0 || strings.Contains(r.URL.Path, "/leases") {
		return false, true
	}
	if h.left--; h.left > 0 {
		return false, true
	}
	if !h.after {
		close(h.dead)
	}
	return h.after, h.after
}

// note remembers whom a request was about.
func (h hop) note(r *http.Request, resp *http.Response) error {
	id := path.Base(r.URL.Path)
	if r.Method == http.MethodPost {
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		var made map[string]struct{ ID string }
		if json.Unmarshal(body, &made) != nil || resp.StatusCode != http.StatusCreated {
			return nil // a refusal
		}
		id = made[strings.TrimSuffix(id, "s")].ID
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wrote[id] = true
	return nil
}
