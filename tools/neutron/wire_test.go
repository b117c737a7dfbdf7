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

// errDead is the error of all requests of a killed controller.
var errDead = errors.New("killed")

// wire intercepts all requests of a controller to its API server and to Neutron. It kills the controller at one of them: from
// then on every request fails.
type wire struct {
	dead chan struct{} // closed

	mu    sync.Mutex
	left  int  // requests until the kill, including the killed one; 0: never
	after bool // the last request still takes effect, but its response is lost
	wrote map[string]bool
}

// newWire returns a wire that records in wrote the ids of the Neutron objects that the controller writes or tries to write.
func newWire(wrote map[string]bool) *wire { return &wire{dead: make(chan struct{}), wrote: wrote} }

// dieAt makes the wire kill the controller at the nth request from now on, or never if n is 0.
func (w *wire) dieAt(n int, after bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left, w.after = n, after
}

// kubernetes and neutron wrap the transports to the API server and to Neutron.
func (w *wire) kubernetes(to http.RoundTripper) http.RoundTripper { return hop{w, to, false} }
func (w *wire) neutron(to http.RoundTripper) http.RoundTripper    { return hop{w, to, true} }

// hop is one of these two transports.
type hop struct {
	*wire
	to    http.RoundTripper
	notes bool // record written objects
}

// RoundTrip implements http.RoundTripper.
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

// count reports whether the wire kills the controller at a request, and whether the request still takes effect. Renewals of the
// Lease do not count, because they happen at any time.
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

// note records the id of the object that a request writes.
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
			return nil // the request was refused
		}
		id = made[strings.TrimSuffix(id, "s")].ID
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wrote[id] = true
	return nil
}
