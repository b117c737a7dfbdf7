package neutrontest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/workloads/internal/openstack/openstacktest"
)

// Object is an object of the cloud in its JSON form: https://docs.openstack.org/api-ref/network/v2/
type Object = openstacktest.Object

// Names of the lists, for Fake.FailList.
const (
	Groups = "security_groups"
	Ports  = "ports"
)

// Fake is an in-memory Keystone and Neutron. Its clouds.yaml has two projects: mine, which has the ports and a group default, and
// strange.
type Fake struct {
	*openstacktest.Fake

	// MaxRules is the quota of rules of all groups.
	MaxRules atomic.Int64
	// Writes counts all requests that change something.
	Writes atomic.Int64

	ids atomic.Int64
}

// NewFake starts a Fake that ends with the test. Its pages have two objects each.
func NewFake(t testing.TB) *Fake {
	t.Helper()
	f := &Fake{}
	f.MaxRules.Store(100)
	f.Fake = openstacktest.NewFake(t, openstacktest.Service{
		Type: "network", Version: "2.0", Base: "network/", Lists: map[string]string{Groups: "v2.0/security-groups", Ports: "v2.0/ports"},
		Writes: map[string]func(map[string][]Object, *http.Request) (int, any){
			"POST v2.0/security-groups":             f.counted(f.createGroup),
			"DELETE v2.0/security-groups/{id}":      f.counted(f.deleteGroup),
			"POST v2.0/security-group-rules":        f.counted(f.createRules),
			"DELETE v2.0/security-group-rules/{id}": f.counted(f.deleteRule),
			"PUT v2.0/ports/{id}":                   f.counted(f.updatePort),
			"PUT v2.0/ports/{id}/tags":              f.counted(f.replaceTags),
			"PUT v2.0/ports/{id}/tags/{tag}":        f.counted(f.addTag),
			"DELETE v2.0/ports/{id}/tags/{tag}":     f.counted(f.deleteTag),
			"GET v2.0/ports/{id}":                   f.getPort,
		},
	})
	f.AddGroup("default")
	return f
}

// counted adds a handler's requests to Writes.
func (f *Fake) counted(handle func(map[string][]Object, *http.Request) (int, any)) func(map[string][]Object, *http.Request) (int, any) {
	return func(lists map[string][]Object, r *http.Request) (int, any) {
		f.Writes.Add(1)
		return handle(lists, r)
	}
}

// AddGroup adds a group without rules, and returns its ID.
func (f *Fake) AddGroup(name string) string {
	return f.AddTo(Groups, func(n int) Object {
		return Object{
			"id": fmt.Sprintf("group-%03d", n), "name": name, "description": "", "project_id": "mine", "tenant_id": "mine", "security_group_rules": []Object{}, "tags": []string{},
		}
	}, nil)
}

// AddPort adds a port of a server, with defaults for the fields that o does not set.
func (f *Fake) AddPort(server string, o Object) string {
	return f.AddTo(Ports, func(n int) Object {
		return Object{
			"id": fmt.Sprintf("port-%03d", n), "project_id": "mine", "device_id": server, "security_groups": []string{}, "port_security_enabled": true, "tags": []string{},
			"revision_number": 1,
		}
	}, o)
}

// failure is a response of Neutron that refuses a request.
func failure(status int, kind string) (int, any) {
	return status, Object{"NeutronError": Object{"type": kind, "message": kind, "detail": ""}}
}

// body decodes the body of a request.
func body(r *http.Request) map[string]json.RawMessage {
	read := map[string]json.RawMessage{}
	_ = json.NewDecoder(r.Body).Decode(&read) // a body without the field is refused
	return read
}

// find returns an object of a list.
func find(all []Object, id string) (Object, bool) {
	i := slices.IndexFunc(all, func(o Object) bool { return o["id"] == id })
	if i < 0 {
		return nil, false
	}
	return all[i], true
}

// newRule returns a rule with an ID of its own.
func (f *Fake) newRule(o Object) Object {
	o["id"] = fmt.Sprintf("rule-%03d", f.ids.Add(1))
	return o
}

func (f *Fake) createGroup(lists map[string][]Object, r *http.Request) (int, any) {
	var o Object
	if err := json.Unmarshal(body(r)["security_group"], &o); err != nil {
		return failure(http.StatusBadRequest, "Invalid")
	}
	o["id"], o["tenant_id"], o["tags"] = fmt.Sprintf("group-new-%03d", f.ids.Add(1)), o["project_id"], []string{}
	o["security_group_rules"] = []Object{
		f.newRule(Object{"direction": "egress", "ethertype": "IPv4", "security_group_id": o["id"]}),
		f.newRule(Object{"direction": "egress", "ethertype": "IPv6", "security_group_id": o["id"]}),
	}
	lists[Groups] = append(lists[Groups], o)
	return http.StatusCreated, Object{"security_group": o}
}

func (f *Fake) deleteGroup(lists map[string][]Object, r *http.Request) (int, any) {
	id := r.PathValue("id")
	for _, p := range lists[Ports] {
		if slices.Contains(p["security_groups"].([]string), id) {
			return failure(http.StatusConflict, "SecurityGroupInUse")
		}
	}
	lists[Groups] = slices.DeleteFunc(lists[Groups], func(o Object) bool { return o["id"] == id })
	return http.StatusNoContent, nil
}

func (f *Fake) createRules(lists map[string][]Object, r *http.Request) (int, any) {
	var wanted []Object
	if err := json.Unmarshal(body(r)["security_group_rules"], &wanted); err != nil {
		return failure(http.StatusBadRequest, "Invalid")
	}
	count := len(wanted)
	for _, g := range lists[Groups] {
		count += len(g["security_group_rules"].([]Object))
	}
	if int64(count) > f.MaxRules.Load() {
		return failure(http.StatusConflict, "OverQuota")
	}
	for _, o := range wanted {
		g, ok := find(lists[Groups], fmt.Sprint(o["security_group_id"]))
		if !ok {
			return failure(http.StatusNotFound, "SecurityGroupNotFound")
		}
		g["security_group_rules"] = append(g["security_group_rules"].([]Object), f.newRule(o))
	}
	return http.StatusCreated, Object{"security_group_rules": wanted}
}

func (f *Fake) deleteRule(lists map[string][]Object, r *http.Request) (int, any) {
	for _, g := range lists[Groups] {
		g["security_group_rules"] = slices.DeleteFunc(g["security_group_rules"].([]Object), func(o Object) bool { return o["id"] == r.PathValue("id") })
	}
	return http.StatusNoContent, nil
}

func (f *Fake) updatePort(lists map[string][]Object, r *http.Request) (int, any) {
	p, ok := find(lists[Ports], r.PathValue("id"))
	if !ok {
		return failure(http.StatusNotFound, "PortNotFound")
	}
	var change struct {
		Groups *[]string `json:"security_groups"`
	}
	if err := json.Unmarshal(body(r)["port"], &change); err != nil || change.Groups == nil {
		return failure(http.StatusBadRequest, "Invalid")
	}
	if r.Header.Get("If-Match") != fmt.Sprintf("revision_number=%d", p["revision_number"]) && r.Header.Get("If-Match") != "" {
		return failure(http.StatusPreconditionFailed, "RevisionNumberConstraintFailed")
	}
	for _, id := range *change.Groups {
		if _, ok := find(lists[Groups], id); !ok {
			return failure(http.StatusNotFound, "SecurityGroupNotFound")
		}
	}
	p["security_groups"], p["revision_number"] = *change.Groups, p["revision_number"].(int)+1
	return http.StatusOK, Object{"port": p}
}

func (f *Fake) replaceTags(lists map[string][]Object, r *http.Request) (int, any) {
	p, ok := find(lists[Ports], r.PathValue("id"))
	var tags []string
	err := json.Unmarshal(body(r)["tags"], &tags)
	if !ok {
		return failure(http.StatusNotFound, "PortNotFound")
	}
	if err != nil || slices.ContainsFunc(tags, func(t string) bool { return len(t) > 60 || strings.ContainsAny(t, ",/") }) {
		return failure(http.StatusBadRequest, "Invalid")
	}
	p["tags"] = tags
	return http.StatusOK, Object{"tags": tags}
}

func (f *Fake) addTag(lists map[string][]Object, r *http.Request) (int, any) {
	p, ok := find(lists[Ports], r.PathValue("id"))
	if !ok {
		return failure(http.StatusNotFound, "PortNotFound")
	}
	p["tags"] = append(p["tags"].([]string), r.PathValue("tag"))
	p["revision_number"] = p["revision_number"].(int) + 1
	return http.StatusCreated, nil
}

func (f *Fake) deleteTag(lists map[string][]Object, r *http.Request) (int, any) {
	p, ok := find(lists[Ports], r.PathValue("id"))
	if !ok {
		return failure(http.StatusNotFound, "PortNotFound")
	}
	p["tags"] = slices.DeleteFunc(slices.Clone(p["tags"].([]string)), func(t string) bool { return t == r.PathValue("tag") })
	p["revision_number"] = p["revision_number"].(int) + 1
	return http.StatusNoContent, nil
}

func (f *Fake) getPort(lists map[string][]Object, r *http.Request) (int, any) {
	p, ok := find(lists[Ports], r.PathValue("id"))
	if !ok {
		return failure(http.StatusNotFound, "PortNotFound")
	}
	return http.StatusOK, Object{"port": p}
}
