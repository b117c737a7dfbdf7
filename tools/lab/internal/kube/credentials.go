package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// Admin is the user of people and tests. Each cluster also has users for its components, named like them.
const Admin = "admin"

// Client certificates of the API server, as NAME.crt and NAME.key.
const (
	kubeletClient = "apiserver-kubelet"
	frontProxy    = "front-proxy"
)

// done is the last file that WriteCredentials writes.
const done = ".done"

// KubeletUser is the user of a node's kubelet.
func KubeletUser(node string) string { return "kubelet-" + node }

// WriteCredentials writes the certificates and kubeconfigs of a cluster into the folder dir, unless an earlier call did.
func WriteCredentials(dir string, c topology.Cluster) error {
	if _, err := os.Stat(filepath.Join(dir, done)); err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	ca, err := pki.New(dir, "lab-ca-"+c.Name)
	if err != nil {
		return err
	}
	kubeconfig := func(name, user string, groups ...string) error {
		return ca.WriteKubeconfig(name, c.Name, c.Server(), user, groups...)
	}
	api := c.Machine()
	errs := []error{
		ca.WriteServer(netip.MustParseAddr("127.0.0.1"), c.KubernetesServiceIP(), api.IPv4, api.IPv6),
		ca.WriteClient(kubeletClient, "kube-apiserver-kubelet-client", pki.Masters),
		ca.WriteClient(frontProxy, "front-proxy-client"),
		kubeconfig(Admin, "lab-admin", pki.Masters),
		kubeconfig(ControllerManager, "system:kube-controller-manager"),
		kubeconfig(Scheduler, "system:kube-scheduler"),
		kubeconfig(KubeProxy, "system:kube-proxy"),
	}
	for _, node := range c.NodeNames() { // those that are added later, too
		errs = append(errs, kubeconfig(KubeletUser(node), "system:node:"+node, "system:nodes"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("certificates of %s: %w", c.Name, err)
	}
	return os.WriteFile(filepath.Join(dir, done), nil, 0o600)
}
