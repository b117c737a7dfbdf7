package controller

import (
	"context"
	"errors"
	"net/netip"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/openstack"
)

// errKilled is the error of calls after a crash, and errFailed that of a single failed call.
var (
	errKilled = errors.New("killed")
	errFailed = errors.New("it failed")
)

// crasher crashes a controller at one of its calls. From then on its calls have no effect.
type crasher struct {
	crashMode
	one   sync.Mutex // serialises the calls
	at    int        // number of the call, from 1; 0: never
	armed bool       // or crash at the first call of the kind
	calls int
	dead  bool // with fails: the call was hit
}

// crashMode is the way in which a controller crashes.
type crashMode struct {
	kind  string
	after bool // the call takes effect, and its response is lost
	fails bool // only this call fails, and the controller lives on
	reads bool // reads of the API server count as calls, too
}

func (k *crasher) call(kind string, f func() error) error {
	k.one.Lock()
	defer k.one.Unlock()
	if k.dead && !k.fails {
		return errKilled
	}
	k.calls++
	if k.calls != k.at && (!k.armed || k.kind != kind) {
		return f()
	}
	k.dead = true
	if k.fails {
		return errFailed
	}
	if k.after {
		_ = f()
	}
	return errKilled
}

func (k *crasher) read(f func() error) error {
	k.one.Lock()
	counts := k.reads || k.dead
	k.one.Unlock()
	if counts {
		return k.call("Read", f)
	}
	return f()
}

func crashCall[T any](k *crasher, kind string, f func() (T, error)) (v T, err error) {
	err = k.call(kind, func() (err error) {
		v, err = f()
		return err
	})
	return v, err
}

// client crashes at writes, and with reads at reads: a crash at a read equals one before the next write.
func (k *crasher) client(c client.WithWatch) client.WithWatch {
	return interceptor.NewClient(c, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			return k.read(func() error { return c.Get(ctx, key, obj, opts...) })
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			return k.read(func() error { return c.List(ctx, list, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			return k.call("Patch", func() error { return c.Patch(ctx, obj, patch, opts...) })
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			kind := "Status"
			if _, ok := obj.(*v1alpha1.GatewayNode); ok {
				kind = "NodeStatus"
			}
			return k.call(kind, func() error { return c.SubResource(sub).Patch(ctx, obj, patch, opts...) })
		},
	})
}

type killableAgents struct {
	*fakeAgents
	k *crasher
}

func (f killableAgents) Set(ctx context.Context, targets map[string]agents.Target) {
	set := func() error {
		f.fakeAgents.Set(ctx, targets)
		return nil
	}
	if f.k.fails { // Set cannot fail: it retries by itself
		_ = set()
		return
	}
	_ = f.k.call("Set", set)
}

// killableCloud is a Cloud whose calls may crash the controller.
type killableCloud struct {
	c Cloud
	k *crasher
}

func (c killableCloud) Ports(ctx context.Context) ([]openstack.Port, error) {
	return crashCall(c.k, "Ports", func() ([]openstack.Port, error) { return c.c.Ports(ctx) })
}

func (c killableCloud) CreatePort(ctx context.Context, r openstack.PortRequest) (openstack.Port, error) {
	return crashCall(c.k, "CreatePort", func() (openstack.Port, error) { return c.c.CreatePort(ctx, r) })
}

func (c killableCloud) DeletePort(ctx context.Context, id string) error {
	return c.k.call("DeletePort", func() error { return c.c.DeletePort(ctx, id) })
}

func (c killableCloud) FloatingIPs(ctx context.Context) ([]openstack.FloatingIP, error) {
	return crashCall(c.k, "FloatingIPs", func() ([]openstack.FloatingIP, error) { return c.c.FloatingIPs(ctx) })
}

func (c killableCloud) AllFloatingIPs(ctx context.Context) ([]openstack.FloatingIP, error) {
	return crashCall(c.k, "AllFloatingIPs", func() ([]openstack.FloatingIP, error) { return c.c.AllFloatingIPs(ctx) })
}

func (c killableCloud) CreateFloatingIP(ctx context.Context, network, port string, fixed netip.Addr) (openstack.FloatingIP, error) {
	return crashCall(c.k, "CreateFloatingIP", func() (openstack.FloatingIP, error) { return c.c.CreateFloatingIP(ctx, network, port, fixed) })
}

func (c killableCloud) ReserveFloatingIP(ctx context.Context, network, purpose string) (openstack.FloatingIP, error) {
	return crashCall(c.k, "ReserveFloatingIP", func() (openstack.FloatingIP, error) { return c.c.ReserveFloatingIP(ctx, network, purpose) })
}

func (c killableCloud) AssociateFloatingIP(ctx context.Context, id, port string, fixed netip.Addr) error {
	return c.k.call("AssociateFloatingIP", func() error { return c.c.AssociateFloatingIP(ctx, id, port, fixed) })
}

func (c killableCloud) RetainFloatingIP(ctx context.Context, id, namespace string) error {
	return c.k.call("RetainFloatingIP", func() error { return c.c.RetainFloatingIP(ctx, id, namespace) })
}

func (c killableCloud) DeleteFloatingIP(ctx context.Context, id string) error {
	return c.k.call("DeleteFloatingIP", func() error { return c.c.DeleteFloatingIP(ctx, id) })
}

func (c killableCloud) SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error {
	return c.k.call("SetAddressPairs", func() error { return c.c.SetAddressPairs(ctx, port, had, want) })
}

func (c killableCloud) Quota(ctx context.Context) (openstack.Quota, error) {
	return crashCall(c.k, "Quota", func() (openstack.Quota, error) { return c.c.Quota(ctx) })
}
