package novatest

import (
	"fmt"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/workloads/internal/openstack/openstacktest"
)

// Object is an object of the cloud in its JSON form.
type Object = openstacktest.Object

// Fake is an in-memory Keystone and Nova. Its clouds.yaml has two projects: mine, which has the servers, and strange.
type Fake struct{ *openstacktest.Fake }

// NewFake starts a Fake that ends with the test. Its pages have two servers each.
func NewFake(t testing.TB) Fake {
	t.Helper()
	return Fake{openstacktest.NewFake(t, openstacktest.Service{Type: "compute", Version: "2.1", Base: "v2.1/", Lists: map[string]string{"servers": "servers/detail"}})}
}

// Add adds a server, with defaults for the fields that o does not set.
func (f Fake) Add(o Object) (id string) {
	return f.AddTo("servers", func(n int) Object {
		return Object{
			"id": fmt.Sprintf("server-%03d", n), "name": "vm", "status": "ACTIVE", "created": "2026-01-02T03:04:05Z",
			"accessIPv4": "", "accessIPv6": "", "metadata": Object{}, "tags": []string{},
			"addresses": Object{"net": []Object{fixed(fmt.Sprintf("10.9.0.%d", n)), fixed(fmt.Sprintf("2001:db8::%x", n))}},
		}
	}, o)
}

// Fail sets the status of responses to lists, 0 for servers.
func (f Fake) Fail(status int) { f.FailList("servers", status) }

func fixed(addr string) Object { return Object{"addr": addr, "OS-EXT-IPS:type": "fixed"} }
