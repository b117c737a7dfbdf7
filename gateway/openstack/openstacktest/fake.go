// Package openstacktest provides a fake Neutron with fault injection, and a contract test for the fake and a real one.
package openstacktest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Fake is an in-memory Keystone and Neutron, as far as package openstack uses them. Its responses are those of a real one
// of the release Zed.
type Fake struct {
	// Fault is called before each request of the network service and may inject a fault. Set it while no request is
	// running.
	Fault func(*http.Request) Fault
	// AuthFault is Fault for requests of tokens; it may refuse, hang or throttle.
	AuthFault func(*http.Request) Fault

	server *httptest.Server
	faults sync.Mutex // guards Fault and AuthFault in SetFaults
	mu     sync.Mutex
	ids    int
	token  int
	secret string // of the application credential
	ports  map[string]object
	fips   map[string]object
	quota  map[string]int // -1: no limit
}

// Fault is an injected fault.
type Fault int

// The faults.
const (
	None     Fault = iota
	Refuse         // 503, without effect
	Hang           // no response until the client gives up, without effect
	Lose           // the request takes effect, and the connection closes without a response
	Expire         // 401: the token has expired
	Deny           // 401 by an access rule, with any token
	Stale          // 412: the object was changed since it was read
	Taken          // 409: an address is in use; not a quota
	Throttle       // 429 with RetryAfter, without effect
)

// RetryAfter is the pause that Throttle asks for.
const RetryAfter = time.Second

// object is a resource as Neutron shows it.
type object = map[string]any

// Ids of the initial objects: a network with a subnet of each family and the ports of two gateways, and an external
// network.
const (
	Project  = "project-1"
	Network  = "network-1"
	Subnet4  = "subnet-4"
	Subnet6  = "subnet-6"
	External = "external-1"
	Gateway1 = "gateway-1"
	Gateway2 = "gateway-2"
)

// GatewayAddrs are the addresses of the gateway ports.
var GatewayAddrs = [2]netip.Addr{netip.MustParseAddr("10.9.255.1"), netip.MustParseAddr("10.9.255.2")}

// GatewayIP is the router's address in Subnet4.
var GatewayIP = netip.MustParseAddr("10.9.0.1")

var subnets = map[string]netip.Addr{Subnet4: netip.MustParseAddr("10.9.0.0"), Subnet6: netip.MustParseAddr("fd09::")}

const (
	maxPairs    = 10
	gatewayMAC  = "fa:16:3e:00:00:01"
	externalNet = "198.18.%d.%d"
)

// NewFake starts a fake that stops with the test.
func NewFake(t testing.TB) *Fake {
	t.Helper()
	f := &Fake{secret: "secret", ports: map[string]object{}, fips: map[string]object{}, quota: map[string]int{"port": -1, "floatingip": -1}}
	for i, id := range []string{Gateway1, Gateway2} {
		fixed := []any{object{"subnet_id": Subnet4, "ip_address": GatewayAddrs[i].String()}}
		f.ports[id] = object{
			"id": id, "network_id": Network, "project_id": Project, "device_owner": "compute:nova", "device_id": "vm-" + id, "name": "", "mac_address": gatewayMAC,
			"fixed_ips": fixed, "allowed_address_pairs": []any{}, "revision_number": 1,
		}
	}
	f.server = httptest.NewServer(f.handler())
	t.Cleanup(f.server.Close)
	return f
}

// CloudsYAML writes a clouds.yaml for the fake and returns its path.
func (f *Fake) CloudsYAML(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "clouds.yaml")
	f.WriteClouds(t, path, "secret")
	return path
}

// SetSecret replaces the application credential: its former secret and all tokens are refused from now on.
func (f *Fake) SetSecret(secret string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.secret = secret
	f.token++
}

// WriteClouds writes a clouds.yaml with a secret of the application credential.
func (f *Fake) WriteClouds(t testing.TB, path, secret string) {
	t.Helper()
	text := fmt.Sprintf(`clouds:
  test:
    auth_type: v3applicationcredential
    auth:
      auth_url: %s/v3
      application_credential_id: id
      application_credential_secret: %s
    region_name: RegionOne
`, f.server.URL, secret)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// SetFaults replaces Fault and AuthFault, also while requests are running.
func (f *Fake) SetFaults(fault, auth func(*http.Request) Fault) {
	f.faults.Lock()
	defer f.faults.Unlock()
	f.Fault, f.AuthFault = fault, auth
}

// fault returns the fault of a request.
func (f *Fake) fault(of *func(*http.Request) Fault, r *http.Request) Fault {
	f.faults.Lock()
	inject := *of
	f.faults.Unlock()
	if inject == nil {
		return None
	}
	return inject(r)
}

// Expire makes all tokens invalid.
func (f *Fake) Expire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.token++
}

// SetQuota sets the limit of "port" or "floatingip"; -1 is no limit.
func (f *Fake) SetQuota(resource string, limit int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.quota[resource] = limit
}

// Edit changes a port or a floating IP, as another client would.
func (f *Fake) Edit(id string, change func(map[string]any)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, all := range []map[string]object{f.ports, f.fips} {
		if o, ok := all[id]; ok {
			change(o)
			touch(o)
		}
	}
}

// Remove deletes a port or a floating IP, as another client would.
func (f *Fake) Remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.ports, id)
	delete(f.fips, id)
	f.disassociate(id)
}

// Objects returns the ids of all ports and floating IPs, sorted, without the ports of gateways.
func (f *Fake) Objects() (ports, floatingIPs []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ports = slices.DeleteFunc(slices.Sorted(maps.Keys(f.ports)), func(id string) bool { return id == Gateway1 || id == Gateway2 })
	return ports, slices.Sorted(maps.Keys(f.fips))
}

// disassociate removes a port from its floating IPs. Floating IPs survive their port, which is how they leak.
func (f *Fake) disassociate(port string) {
	for _, o := range f.fips {
		if o["port_id"] == port {
			o["port_id"], o["fixed_ip_address"] = nil, nil
			touch(o)
		}
	}
}

func touch(o object) { o["revision_number"] = o["revision_number"].(int) + 1 }

func (f *Fake) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v3/auth/tokens", f.authenticate)
	mux.HandleFunc("GET /network/{$}", func(w http.ResponseWriter, _ *http.Request) {
		self := object{"rel": "self", "href": f.server.URL + "/network/v2.0/"}
		reply(w, http.StatusOK, object{"versions": []any{object{"id": "v2.0", "status": "CURRENT", "links": []any{self}}}})
	})
	for resource, all := range map[string]*map[string]object{"port": &f.ports, "floatingip": &f.fips} {
		r := &resourceHandler{fake: f, name: resource, all: *all}
		mux.HandleFunc("GET /network/v2.0/"+resource+"s", f.guard(r.list))
		mux.HandleFunc("POST /network/v2.0/"+resource+"s", f.guard(r.create))
		mux.HandleFunc("GET /network/v2.0/"+resource+"s/{id}", f.guard(r.get))
		mux.HandleFunc("PUT /network/v2.0/"+resource+"s/{id}", f.guard(r.update))
		mux.HandleFunc("DELETE /network/v2.0/"+resource+"s/{id}", f.guard(r.remove))
	}
	mux.HandleFunc("GET /network/v2.0/subnets/{id}", f.guard(subnet))
	mux.HandleFunc("GET /network/v2.0/quotas/{project}/details.json", f.guard(f.quotas))
	return mux
}

func (f *Fake) authenticate(w http.ResponseWriter, r *http.Request) {
	var asked struct {
		Auth struct {
			Identity struct {
				Credential struct{ Secret string } `json:"application_credential"`
			}
		}
	}
	_ = json.NewDecoder(r.Body).Decode(&asked) // without a secret it is refused
	if fail(w, r, f.fault(&f.AuthFault, r)) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if asked.Auth.Identity.Credential.Secret != f.secret {
		unauthorized(w)
		return
	}
	f.token++
	w.Header().Set("X-Subject-Token", "token-"+strconv.Itoa(f.token))
	reply(w, http.StatusCreated, object{"token": object{
		"expires_at": time.Now().Add(time.Hour).UTC().Format("2006-01-02T15:04:05.000000Z"),
		"project":    object{"id": Project, "name": "lbaas"},
		"catalog": []any{object{"type": "network", "name": "neutron", "endpoints": []any{object{
			"interface": "public", "region": "RegionOne", "region_id": "RegionOne", "url": f.server.URL + "/network/",
		}}}},
	}})
}

// refusal is an error response.
type refusal struct {
	status int
	kind   string
	text   string
}

// guard serves requests with a valid token and no fault, one at a time.
func (f *Fake) guard(serve func(*http.Request) (status int, body any, no *refusal)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		fault := f.fault(&f.Fault, r)
		f.mu.Lock()
		defer f.mu.Unlock()
		if fault == Expire {
			f.token++ // the client's token is now old
		}
		switch {
		case r.Header.Get("X-Auth-Token") != "token-"+strconv.Itoa(f.token):
			unauthorized(w)
			return
		case fault == Refuse, fault == Throttle:
			fail(w, r, fault)
			return
		case fault == Deny:
			http.Error(w, "an access rule forbids it", http.StatusUnauthorized)
			return
		case fault == Stale:
			no := object{"type": "RevisionNumberConstraintFailed", "message": "Constrained to another revision", "detail": ""}
			reply(w, http.StatusPreconditionFailed, object{"NeutronError": no})
			return
		case fault == Taken:
			no := object{"type": "IpAddressAlreadyAllocated", "message": "IP address already allocated in subnet", "detail": ""}
			reply(w, http.StatusConflict, object{"NeutronError": no})
			return
		case fault == Hang:
			f.mu.Unlock()
			fail(w, r, fault)
			f.mu.Lock()
			return
		}
		status, body, no := serve(r)
		if fault == Lose {
			panic(http.ErrAbortHandler)
		}
		if no != nil {
			status, body = no.status, object{"NeutronError": object{"type": no.kind, "message": no.text, "detail": ""}}
		}
		reply(w, status, body)
	}
}

// fail answers a request, or leaves it without an answer, if there is a fault.
func fail(w http.ResponseWriter, r *http.Request, fault Fault) bool {
	switch fault {
	case Refuse:
		http.Error(w, "upstream is away", http.StatusServiceUnavailable)
	case Throttle:
		w.Header().Set("Retry-After", strconv.Itoa(int(RetryAfter/time.Second)))
		http.Error(w, "too many requests", http.StatusTooManyRequests)
	case Hang:
		_, _ = io.Copy(io.Discard, r.Body) // the server notices a closed connection only after reading the body
		<-r.Context().Done()
	default:
		return false
	}
	return true
}

func unauthorized(w http.ResponseWriter) {
	reply(w, http.StatusUnauthorized, object{"error": object{"code": 401, "title": "Unauthorized", "message": "The request you have made requires authentication."}})
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if body != nil {
		_ = json.NewEncoder(w).Encode(body) // an error means that the client has gone
	}
}

func (f *Fake) quotas(r *http.Request) (int, any, *refusal) {
	use := func(name string, used int) object {
		return object{"limit": f.quota[name], "used": used, "reserved": 0}
	}
	return http.StatusOK, object{"quota": object{"port": use("port", len(f.ports)), "floatingip": use("floatingip", len(f.fips))}}, nil
}

// resourceHandler serves one kind of object.
type resourceHandler struct {
	fake *Fake
	name string
	all  map[string]object
}

func (h *resourceHandler) list(r *http.Request) (int, any, *refusal) {
	found := []object{}
	for _, id := range slices.Sorted(maps.Keys(h.all)) {
		matches := true
		for key, values := range r.URL.Query() {
			matches = matches && slices.Contains(values, fmt.Sprint(h.all[id][key]))
		}
		if matches {
			found = append(found, h.all[id])
		}
	}
	return http.StatusOK, object{h.name + "s": found}, nil
}

func (h *resourceHandler) get(r *http.Request) (int, any, *refusal) {
	o, no := h.find(r)
	return http.StatusOK, object{h.name: o}, no
}

func (h *resourceHandler) find(r *http.Request) (object, *refusal) {
	id := r.PathValue("id")
	if o, ok := h.all[id]; ok {
		return o, nil
	}
	kind := map[string]string{"port": "PortNotFound", "floatingip": "FloatingIPNotFound"}[h.name]
	return nil, &refusal{http.StatusNotFound, kind, h.name + " " + id + " could not be found."}
}

func (h *resourceHandler) create(r *http.Request) (int, any, *refusal) {
	asked, no := h.read(r)
	if no != nil {
		return 0, nil, no
	}
	if limit := h.fake.quota[h.name]; limit >= 0 && len(h.all) >= limit {
		return 0, nil, &refusal{http.StatusConflict, "OverQuota", "Quota exceeded for resources: ['" + h.name + "']."}
	}
	h.fake.ids++
	id := fmt.Sprintf("%s-id-%03d", h.name, h.fake.ids)
	o := object{"id": id, "project_id": Project, "tenant_id": Project, "revision_number": 1, "description": "", "tags": []any{}}
	maps.Copy(o, asked)
	if h.name == "port" {
		no = h.fake.completePort(o)
	} else {
		o["floating_ip_address"] = fmt.Sprintf(externalNet, byte(h.fake.ids>>8), byte(h.fake.ids))
		no = h.fake.checkFloatingIP(o)
	}
	if no != nil {
		return 0, nil, no
	}
	h.all[id] = o
	return http.StatusCreated, object{h.name: o}, nil
}

func (h *resourceHandler) read(r *http.Request) (object, *refusal) {
	var body map[string]object
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body[h.name] == nil {
		return nil, &refusal{http.StatusBadRequest, "HTTPBadRequest", "body is not a " + h.name}
	}
	return body[h.name], nil
}

// completePort gives a new port its addresses.
func (f *Fake) completePort(o object) *refusal {
	if o["network_id"] != Network {
		return &refusal{http.StatusNotFound, "NetworkNotFound", fmt.Sprintf("Network %v could not be found.", o["network_id"])}
	}
	asked, _ := o["fixed_ips"].([]any)
	fixed := []any{}
	for _, a := range asked {
		subnet, _ := a.(object)["subnet_id"].(string)
		base, ok := subnets[subnet]
		if !ok {
			return &refusal{http.StatusBadRequest, "InvalidInput", "no subnet " + subnet + " in the network"}
		}
		addr := within(base, f.ids)
		if text, ok := a.(object)["ip_address"].(string); ok {
			var err error
			if addr, err = netip.ParseAddr(text); err != nil {
				return &refusal{http.StatusBadRequest, "InvalidInput", err.Error()}
			}
			if f.allocated(addr) {
				return &refusal{http.StatusConflict, "IpAddressAlreadyAllocated", fmt.Sprintf("IP address %s already allocated in subnet %s", addr, subnet)}
			}
		}
		for f.allocated(addr) {
			addr = addr.Next()
		}
		fixed = append(fixed, object{"subnet_id": subnet, "ip_address": addr.String()})
	}
	o["fixed_ips"], o["allowed_address_pairs"], o["mac_address"] = fixed, []any{}, gatewayMAC
	return nil
}

// within returns an address of a subnet.
func within(base netip.Addr, n int) netip.Addr {
	b := base.AsSlice()
	b[len(b)-2], b[len(b)-1] = byte(n>>8), byte(n)
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// allocated reports whether a port has an address.
func (f *Fake) allocated(a netip.Addr) bool {
	for _, p := range f.ports {
		if fixed, ok := p["fixed_ips"].([]any); ok && slices.ContainsFunc(fixed, func(ip any) bool { return ip.(object)["ip_address"] == a.String() }) {
			return true
		}
	}
	return false
}

// subnet returns a subnet with its allocation pool.
func subnet(r *http.Request) (int, any, *refusal) {
	id := r.PathValue("id")
	base, ok := subnets[id]
	if !ok {
		return 0, nil, &refusal{http.StatusNotFound, "SubnetNotFound", fmt.Sprintf("Subnet %s could not be found.", id)}
	}
	pool := object{"start": within(base, 2).String(), "end": within(base, 1<<16-2).String()}
	return http.StatusOK, object{"subnet": object{"id": id, "network_id": Network, "gateway_ip": within(base, 1).String(), "allocation_pools": []any{pool}}}, nil
}

// checkFloatingIP verifies that the target of a floating IP exists and that no other one leads there.
func (f *Fake) checkFloatingIP(o object) *refusal {
	if o["floating_network_id"] != External {
		return &refusal{http.StatusNotFound, "NetworkNotFound", fmt.Sprintf("Network %v could not be found.", o["floating_network_id"])}
	}
	port, _ := o["port_id"].(string)
	if port == "" {
		o["port_id"], o["fixed_ip_address"] = nil, nil
		return nil
	}
	p, ok := f.ports[port]
	if !ok {
		return &refusal{http.StatusNotFound, "PortNotFound", "Port " + port + " could not be found."}
	}
	has := slices.ContainsFunc(p["fixed_ips"].([]any), func(ip any) bool { return ip.(object)["ip_address"] == o["fixed_ip_address"] })
	if !has {
		return &refusal{http.StatusBadRequest, "BadRequest", "Port does not have the fixed address."}
	}
	for id, other := range f.fips {
		if id != o["id"] && other["port_id"] == port && other["fixed_ip_address"] == o["fixed_ip_address"] {
			return &refusal{http.StatusConflict, "FloatingIPPortAlreadyAssociated", "The fixed address already has a floating IP."}
		}
	}
	return nil
}

func (h *resourceHandler) update(r *http.Request) (int, any, *refusal) {
	o, no := h.find(r)
	if no != nil {
		return 0, nil, no
	}
	asked, no := h.read(r)
	if no != nil {
		return 0, nil, no
	}
	if want, ok := strings.CutPrefix(r.Header.Get("If-Match"), "revision_number="); ok && want != fmt.Sprint(o["revision_number"]) {
		return 0, nil, &refusal{http.StatusPreconditionFailed, "RevisionNumberConstraintFailed", "Constrained to " + want}
	}
	next := maps.Clone(o)
	maps.Copy(next, asked)
	if h.name == "port" {
		no = checkPairs(next)
	} else {
		no = h.fake.checkFloatingIP(next)
	}
	if no != nil {
		return 0, nil, no
	}
	touch(next)
	h.all[r.PathValue("id")] = next
	return http.StatusOK, object{h.name: next}, nil
}

// checkPairs fills in missing MAC addresses.
func checkPairs(o object) *refusal {
	pairs := o["allowed_address_pairs"].([]any)
	if len(pairs) > maxPairs {
		return &refusal{http.StatusBadRequest, "AllowedAddressPairExhausted", fmt.Sprintf("The number of allowed address pair exceeds the maximum %d.", maxPairs)}
	}
	seen := map[string]bool{}
	for _, p := range pairs {
		pair := p.(object)
		if pair["mac_address"] == nil || pair["mac_address"] == "" {
			pair["mac_address"] = o["mac_address"]
		}
		key := fmt.Sprint(pair["ip_address"], pair["mac_address"])
		if seen[key] {
			return &refusal{http.StatusBadRequest, "DuplicateAddressPairInRequest", "Request contains duplicate address pair."}
		}
		seen[key] = true
	}
	return nil
}

func (h *resourceHandler) remove(r *http.Request) (int, any, *refusal) {
	o, no := h.find(r)
	if no != nil {
		return 0, nil, no
	}
	delete(h.all, o["id"].(string))
	if h.name == "port" {
		h.fake.disassociate(o["id"].(string))
	}
	return http.StatusNoContent, nil, nil
}
