package simulation

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/scale/internal/meter"
)

// member is a real member.
type member struct {
	id     clusterset.ClusterID
	dir    string
	server *apiserver.Server
	client client.WithWatch // of the administrator
	meter  *meter.Meter     // between its controller and the broker
	listen string           // where the controller serves its metrics

	controller *process.Process // nil if it does not run
	ends       []func()         // they end its watches
}

func newClient(cfg *rest.Config) (client.WithWatch, error) {
	scheme, err := membership.NewScheme()
	if err != nil {
		return nil, err
	}
	return client.NewWithWatch(cfg, client.Options{Scheme: scheme})
}

// newMember starts the API server of a real member, in the folder dir. The member is not registered yet.
func (w *ClusterSet) newMember(ctx context.Context, id clusterset.ClusterID, dir string) (*member, error) {
	server, err := w.startServer(ctx, dir)
	if err != nil {
		return nil, err
	}
	m := &member{id: id, dir: filepath.Join(w.dir, dir), server: server}
	all, err := crds.All()
	if err != nil {
		return nil, err
	}
	if _, err := envtest.InstallCRDs(server.As(apiserver.Admin), envtest.CRDInstallOptions{CRDs: all}); err != nil {
		return nil, fmt.Errorf("install definitions in %s: %w", id, err)
	}
	if m.client, err = newClient(server.As(apiserver.Admin)); err != nil {
		return nil, err
	}
	names := []string{v1alpha1.DefaultNamespace}
	for i := range namespaces {
		names = append(names, namespace(i))
	}
	for _, name := range names {
		if err := m.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
			return nil, fmt.Errorf("namespace %s in %s: %w", name, id, err)
		}
	}
	w.onClose(m.stop)
	return m, server.WriteKubeconfig(m.path("kubeconfig"), apiserver.Admin, server.Address(), "")
}

func (m *member) path(name string) string { return filepath.Join(m.dir, name) }

// start starts the member's controller with additional flags.
func (m *member) start(ctx context.Context, path string, flags ...string) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("find a free port: %w", err)
	}
	m.listen = listener.Addr().String()
	if err := listener.Close(); err != nil {
		return err
	}
	flags = append(flags, "--kubeconfig="+m.path("kubeconfig"), "--broker-kubeconfig="+m.path("broker.kubeconfig"), "--listen="+m.listen, "--insecure-http")
	m.controller, err = process.Start(path, m.path("controller.log"), flags...)
	return err
}

// stop ends the member's controller, if it runs.
func (m *member) stop() error {
	if m.controller == nil {
		return nil
	}
	err := m.controller.Stop()
	m.controller = nil
	return err
}

// failure returns why the member's controller exited, or nil if it runs or was never started.
func (m *member) failure() error {
	if m == nil || m.controller == nil {
		return nil
	}
	select {
	case <-m.controller.Ended():
		return fmt.Errorf("member %s: %w", m.id, m.controller.Failure())
	default:
		return nil
	}
}

// ready reports whether the controller is ready.
func (m *member) ready(ctx context.Context) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.listen+"/readyz", nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false // it does not listen yet
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// Log copies the log of a's controller to path.
func (w *ClusterSet) Log(path string) error {
	content, err := os.ReadFile(w.a.path("controller.log"))
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

// startImporter starts the controller of a and returns the time of its start.
func (w *ClusterSet) startImporter(ctx context.Context) (time.Time, error) {
	now := time.Now()
	return now, w.a.start(ctx, w.cfg.Controller)
}

// ReplaceImporter stops the controller of a, and replaces the API server by an empty one.
func (w *ClusterSet) ReplaceImporter(ctx context.Context) error {
	old := w.a
	for _, end := range old.ends {
		end()
	}
	err := old.stop()
	old.server.Stop()
	if err != nil {
		return err
	}
	old.meter.Close()
	w.say("give a another API server")
	a, err := w.newMember(ctx, importerID, filepath.Base(old.dir)+"+")
	if err != nil {
		return err
	}
	w.a = a
	if err := os.RemoveAll(old.dir); err != nil {
		return err
	}
	if err := w.equip(ctx, a); err != nil {
		return err
	}
	return w.observe(ctx)
}
