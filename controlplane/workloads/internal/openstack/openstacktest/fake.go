// Package openstacktest holds an in-memory fake of Keystone and of services that list objects.
package openstacktest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Object is an object of the cloud in its JSON form.
type Object = map[string]any

// Service is a service of the catalog.
type Service struct {
	Type    string // in the catalog
	Version string // that the service announces, such as 2.1
	Base    string // path of its endpoint below that of the project; it ends in a slash
	// Lists are the paths of lists below the endpoint, by the names of the lists in responses.
	Lists map[string]string
	// Writes handle other requests, by their methods and paths below the endpoint, such as "PUT v2.0/ports/{id}". The lists of
	// the fake are locked meanwhile. The result is the status and the body of the response.
	Writes map[string]func(lists map[string][]Object, r *http.Request) (status int, body any)
}

// Fake is an in-memory Keystone with services. Its clouds.yaml has two projects: mine, which has the objects, and strange.
type Fake struct {
	server   *httptest.Server
	services []Service

	mu      sync.Mutex
	lists   map[string][]Object
	ids     int
	absent  string         // type of a service that the catalog lacks
	asked   map[string]int // number of requests for each list
	failing map[string]int // status of the responses to requests for a list, 0 for OK
	page    int            // objects on each page
}

// NewFake starts a Fake that ends with the test. Its pages have two objects each.
func NewFake(t testing.TB, services ...Service) *Fake {
	t.Helper()
	f := &Fake{services: services, lists: map[string][]Object{}, asked: map[string]int{}, failing: map[string]int{}, page: 2}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v3/auth/tokens", f.signIn)
	for _, s := range services {
		mux.HandleFunc("GET /{project}/"+s.Base+"{$}", func(w http.ResponseWriter, r *http.Request) { f.version(w, r, s.Version) })
		for list, path := range s.Lists {
			mux.HandleFunc("GET /{project}/"+s.Base+path, func(w http.ResponseWriter, r *http.Request) { f.list(w, r, list) })
		}
		for request, write := range s.Writes {
			method, path, _ := strings.Cut(request, " ")
			mux.HandleFunc(method+" /{project}/"+s.Base+path, func(w http.ResponseWriter, r *http.Request) {
				f.mu.Lock()
				defer f.mu.Unlock()
				status, body := write(f.lists, r)
				reply(w, status, body)
			})
		}
	}
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

// AddTo adds an object to a list, with the fields of the objects in order; the last ones count. defaults returns the first of
// them, for a number that no other object has.
func (f *Fake) AddTo(list string, defaults func(number int) Object, o Object) (id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ids++
	added := defaults(f.ids)
	maps.Copy(added, o)
	f.lists[list] = append(f.lists[list], added)
	return added["id"].(string)
}

// Objects returns the objects of a list.
func (f *Fake) Objects(list string) []Object {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.lists[list])
}

// Set changes a field of an object.
func (f *Fake) Set(id, field string, value any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, all := range f.lists {
		for _, o := range all {
			if o["id"] == id {
				o[field] = value
			}
		}
	}
}

// Remove removes an object.
func (f *Fake) Remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for list, all := range f.lists {
		f.lists[list] = slices.DeleteFunc(all, func(o Object) bool { return o["id"] == id })
	}
}

// FailList sets the status of responses to requests for a list, 0 for OK.
func (f *Fake) FailList(list string, status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failing[list] = status
}

// Asked returns the number of requests for a list.
func (f *Fake) Asked(list string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[list]
}

// Withdraw removes a service from the catalog of later sessions; "" restores it.
func (f *Fake) Withdraw(kind string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.absent = kind
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
	project := asked.Auth.Scope.Project.Name
	var catalog []Object
	for _, s := range f.services {
		if s.Type != f.absent {
			endpoint := Object{"interface": "public", "region": "r", "region_id": "r", "url": f.server.URL + "/" + project + "/" + s.Base}
			catalog = append(catalog, Object{"type": s.Type, "name": s.Type, "endpoints": []Object{endpoint}})
		}
	}
	w.Header().Set("X-Subject-Token", "token")
	reply(w, http.StatusCreated, Object{"token": Object{
		"expires_at": "2099-01-01T00:00:00.000000Z", "project": Object{"id": project, "name": project}, "catalog": catalog,
	}})
}

// version serves the version of a service.
func (f *Fake) version(w http.ResponseWriter, r *http.Request, version string) {
	self := Object{"rel": "self", "href": f.server.URL + r.URL.Path}
	reply(w, http.StatusOK, Object{"versions": []Object{{"id": "v" + version, "status": "CURRENT", "links": []Object{self}}}})
}

// list serves a page of a list after the object that marker names. An administrator, here everybody, gets the objects of all
// projects below the path of mine, unless project_id selects some.
func (f *Fake) list(w http.ResponseWriter, r *http.Request, list string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked[list]++
	if status := f.failing[list]; status != 0 {
		http.Error(w, "it does not work", status)
		return
	}
	all := slices.Clone(f.lists[list])
	if r.PathValue("project") != "mine" {
		all = nil
	}
	query := r.URL.Query()
	if project := query.Get("project_id"); project != "" {
		all = slices.DeleteFunc(all, func(o Object) bool { return o["project_id"] != project })
	}
	if marker := query.Get("marker"); marker != "" {
		all = all[1+slices.IndexFunc(all, func(o Object) bool { return o["id"] == marker }):]
	}
	page := all[:min(len(all), f.page)]
	answer := Object{list: slices.Concat([]Object{}, page)}
	if len(page) < len(all) {
		query.Set("marker", page[len(page)-1]["id"].(string))
		answer[list+"_links"] = []Object{{"rel": "next", "href": fmt.Sprintf("%s%s?%s", f.server.URL, r.URL.Path, query.Encode())}}
	}
	reply(w, http.StatusOK, answer)
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // the client may have disconnected
}
