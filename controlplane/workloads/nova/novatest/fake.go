package novatest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// Object is an object of the cloud in its JSON form.
type Object = map[string]any

// Fake is an in-memory Keystone and Nova. Its clouds.yaml has two projects: mine, which has the servers, and strange.
type Fake struct {
	server *httptest.Server

	mu      sync.Mutex
	servers []Object
	ids     int
	status  int // of the response to a list, 0 for OK
	page    int // servers on each page
}

// NewFake starts a Fake that ends with the test. Its pages have two servers each.
func NewFake(t testing.TB) *Fake {
	t.Helper()
	f := &Fake{page: 2}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v3/auth/tokens", f.signIn)
	mux.HandleFunc("GET /{project}/v2.1/{$}", f.version)
	mux.HandleFunc("GET /{project}/v2.1/servers/detail", f.list)
	f.server = httptest.NewServer(mux)
	t.Cleanup(f.server.Close)
	return f
}

// CloudsYAML writes a clouds.yaml and returns its path.
func (f *Fake) CloudsYAML(t testing.TB) string {
	t.Helper()
	const entry = "  %s: {auth: {auth_url: %s/v3, username: u, password: p, project_name: %[1]s, user_domain_name: d, project_domain_name: d}}\n"
	text := "clouds:\n" + fmt.Sprintf(entry, "mine", f.server.URL) + fmt.Sprintf(entry, "strange", f.server.URL)
	path := filepath.Join(t.TempDir(), "clouds.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Add adds a server, with defaults for the fields that o does not set.
func (f *Fake) Add(o Object) (id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ids++
	id = fmt.Sprintf("server-%03d", f.ids)
	s := Object{
		"id": id, "name": "vm", "status": "ACTIVE", "created": "2026-01-02T03:04:05Z", "accessIPv4": "", "accessIPv6": "", "metadata": Object{}, "tags": []string{},
		"addresses": Object{"net": []Object{fixed(fmt.Sprintf("10.9.0.%d", f.ids)), fixed(fmt.Sprintf("2001:db8::%x", f.ids))}},
	}
	maps.Copy(s, o)
	f.servers = append(f.servers, s)
	return id
}

func fixed(addr string) Object { return Object{"addr": addr, "OS-EXT-IPS:type": "fixed"} }

// Set changes a field of a server.
func (f *Fake) Set(id, field string, value any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.servers {
		if s["id"] == id {
			s[field] = value
		}
	}
}

// Remove removes a server.
func (f *Fake) Remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.servers = slices.DeleteFunc(f.servers, func(s Object) bool { return s["id"] == id })
}

// Fail sets the status of responses to lists, 0 for servers.
func (f *Fake) Fail(status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status = status
}

func (f *Fake) signIn(w http.ResponseWriter, r *http.Request) {
	var asked struct {
		Auth struct {
			Scope struct{ Project struct{ Name string } }
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	w.Header().Set("X-Subject-Token", "token")
	reply(w, http.StatusCreated, Object{"token": Object{
		"expires_at": "2099-01-01T00:00:00.000000Z",
		"catalog": []Object{{"type": "compute", "name": "nova", "endpoints": []Object{{
			"interface": "public", "region": "r", "region_id": "r", "url": f.server.URL + "/" + asked.Auth.Scope.Project.Name + "/v2.1/",
		}}}},
	}})
}

// version serves the version of the API.
func (f *Fake) version(w http.ResponseWriter, r *http.Request) {
	self := Object{"rel": "self", "href": f.server.URL + r.URL.Path}
	reply(w, http.StatusOK, Object{"version": Object{"id": "v2.1", "status": "CURRENT", "version": "2.93", "min_version": "2.1", "links": []Object{self}}})
}

// list serves a page of servers after the one that marker names.
func (f *Fake) list(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.status != 0 {
		http.Error(w, "it does not work", f.status)
		return
	}
	all := f.servers
	if r.PathValue("project") != "mine" {
		all = nil
	}
	if marker := r.URL.Query().Get("marker"); marker != "" {
		all = all[1+slices.IndexFunc(all, func(s Object) bool { return s["id"] == marker }):]
	}
	page := all[:min(len(all), f.page)]
	answer := Object{"servers": slices.Concat([]Object{}, page)}
	if len(page) < len(all) {
		next := fmt.Sprintf("%s%s?marker=%s", f.server.URL, r.URL.Path, page[len(page)-1]["id"])
		answer["servers_links"] = []Object{{"rel": "next", "href": next}}
	}
	reply(w, http.StatusOK, answer)
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // the client may have disconnected
}
