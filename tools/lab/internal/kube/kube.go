// Package kube defines how the lab runs the components of a Kubernetes cluster: programs, flags, environment, configuration
// files and credentials. It starts nothing.
package kube

import (
	"bytes"
	"embed"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"text/template"

	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// Names of the components.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	Containerd        = "containerd"
	Kubelet           = "kubelet"
	KubeProxy         = "kube-proxy"
)

// Images of the cluster's own pods.
const (
	PauseImage   = "isthmus/lab-pause:dev"
	CoreDNSImage = "isthmus/lab-coredns:dev"
)

// Values of Options. The first of each group is the default.
var (
	ProxyModes = []string{"nftables", "iptables"}
	CNIs       = []string{"ptp", "bridge"}
)

// Options are the differences between labs, besides the topology.
type Options struct {
	ProxyMode string // of kube-proxy
	CNI       string // the main plugin
}

// environment returns the environment of components: the PATH in which containerd finds runc and its shim, and kube-proxy
// finds nft. A lab has many more components than the machine has CPUs, so each uses half of them at most: Go's scheduler
// spends less on threads that find nothing to do. A GOGC of the caller's is theirs too: tests have memory to spend.
func environment() []string {
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root",
		"GOMAXPROCS=" + strconv.Itoa(max(1, runtime.NumCPU()/2)),
	}
	if percent, ok := os.LookupEnv("GOGC"); ok {
		env = append(env, "GOGC="+percent)
	}
	return env
}

// nodeless are the controllers that a control plane without nodes needs: tokens and default ServiceAccounts, namespace
// deletion, garbage collection, EndpointSlices, and roles that aggregate others.
const nodeless = "serviceaccount-controller,serviceaccount-token-controller,root-ca-certificate-publisher-controller," +
	"namespace-controller,garbage-collector-controller,endpointslice-controller,endpointslice-mirroring-controller," +
	"clusterrole-aggregation-controller,validatingadmissionpolicy-status-controller"

// Plan defines the components of one cluster, from the paths of its binaries and certificates.
type Plan struct {
	Cluster topology.Cluster
	Options Options
	Bin     map[string]string // executable of each component, absolute
	PKI     string            // folder of WriteCredentials
}

// Store returns etcd and the API server, which start together.
func (p Plan) Store() []supervisor.Component {
	loopback := netip.MustParseAddr("127.0.0.1")
	etcd := apiserver.Etcd{
		Name: p.Cluster.Name, DataDir: "/var/lib/etcd/data", NoFsync: true,
		Client: netip.AddrPortFrom(loopback, 2379), Peer: netip.AddrPortFrom(loopback, 2380),
	}
	server := apiserver.Flags{
		Etcd: etcd.URL(), Advertise: p.Cluster.Advertise(), Port: 6443, ServiceCIDRs: p.Cluster.ServiceCIDRs(), PKI: p.PKI, ClientCA: pki.File(p.PKI, pki.CA),
		Issuer: "https://kubernetes.default.svc.cluster.local", Authorization: "Node,RBAC",
		More: []string{
			"--v=1",
			"--enable-admission-plugins=NodeRestriction",
			"--kubelet-client-certificate=" + pki.File(p.PKI, kubeletClient+".crt"),
			"--kubelet-client-key=" + pki.File(p.PKI, kubeletClient+".key"),
			"--kubelet-preferred-address-types=InternalIP",
			"--requestheader-client-ca-file=" + pki.File(p.PKI, pki.CA),
			"--requestheader-allowed-names=front-proxy-client",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-username-headers=X-Remote-User",
			"--proxy-client-cert-file=" + pki.File(p.PKI, frontProxy+".crt"),
			"--proxy-client-key-file=" + pki.File(p.PKI, frontProxy+".key"),
			// Webhooks are reached at pod addresses: kube-proxy does not run here.
			"--enable-aggregator-routing=true",
			"--endpoint-reconciler-type=lease",
		},
	}
	return []supervisor.Component{p.component(Etcd, etcd.Flags()...), p.component(APIServer, server.List()...)}
}

// Controllers returns the control plane's clients, which start when the API server answers.
func (p Plan) Controllers() []supervisor.Component {
	controllers := "*"
	if len(p.Cluster.Nodes) == 0 {
		controllers = nodeless
	}
	all := []supervisor.Component{p.component(ControllerManager,
		"--v=1",
		"--kubeconfig="+pki.Kubeconfig(p.PKI, ControllerManager),
		"--leader-elect=false",
		"--controllers="+controllers,
		"--use-service-account-credentials=true",
		"--service-account-private-key-file="+pki.File(p.PKI, pki.ServiceAccountKey),
		"--root-ca-file="+pki.File(p.PKI, pki.CA),
		"--cluster-signing-cert-file="+pki.File(p.PKI, pki.CA),
		"--cluster-signing-key-file="+pki.File(p.PKI, pki.CAKey),
		"--cluster-name="+p.Cluster.Name,
		"--cluster-cidr="+join(p.Cluster.PodCIDRs()),
		"--service-cluster-ip-range="+join(p.Cluster.ServiceCIDRs()),
		"--allocate-node-cidrs=false", // the lab sets spec.podCIDRs
		// The default limit, 20 a second, makes default ServiceAccounts 5 s late.
		"--kube-api-qps=300",
		"--kube-api-burst=600",
		"--node-monitor-grace-period=20s",
		"--profiling=false")}
	if len(p.Cluster.Nodes) > 0 {
		all = append(all, p.component(Scheduler,
			"--v=1",
			"--kubeconfig="+pki.Kubeconfig(p.PKI, Scheduler),
			"--leader-elect=false",
			"--profiling=false"))
	}
	return all
}

// Runtime returns the components of a node that start before its API server answers.
func (p Plan) Runtime(topology.Node) []supervisor.Component {
	return []supervisor.Component{p.component(Containerd, "--config=/etc/kubernetes/containerd.toml")}
}

// Agents returns the node's clients of the API server.
func (p Plan) Agents(n topology.Node) []supervisor.Component {
	return []supervisor.Component{
		p.component(Kubelet,
			"--v=1",
			"--config=/etc/kubernetes/kubelet.yaml",
			"--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
			"--node-ip="+join(n.Addresses()),
			"--hostname-override="+n.Name,
			"--root-dir=/var/lib/kubelet"),
		p.component(KubeProxy, "--v=1", "--config=/etc/kubernetes/kube-proxy.yaml"),
	}
}

// Labels returns the labels that a cloud provider would set on the node.
func Labels(n topology.Node) map[string]string {
	return map[string]string{
		"topology.kubernetes.io/region": "lab",
		"topology.kubernetes.io/zone":   n.Cluster,
		"kubernetes.io/hostname":        n.Name,
		"kubernetes.io/os":              "linux",
	}
}

func (p Plan) component(name string, flags ...string) supervisor.Component {
	return supervisor.Component{Name: name, Argv: append([]string{p.Bin[name]}, flags...), Env: environment()}
}

// join lists addresses or networks in the form of flags.
func join[T fmt.Stringer](all []T) string {
	texts := make([]string, len(all))
	for i, each := range all {
		texts[i] = each.String()
	}
	return strings.Join(texts, ",")
}

//go:embed files
var files embed.FS

var templates = template.Must(template.New("").Funcs(template.FuncMap{"cidrs": join[netip.Prefix]}).ParseFS(files, "files/*.tmpl"))

// view is the input of the templates.
type view struct {
	Cluster      topology.Cluster
	Node         topology.Node
	Options      Options
	PauseImage   string
	CoreDNSImage string
}

// NodeFiles returns the configuration files of a node by path below /etc. pauseRef is the pause image's name in containerd.
func (p Plan) NodeFiles(n topology.Node, pauseRef string) (map[string]string, error) {
	v := view{Cluster: p.Cluster, Node: n, Options: p.Options, PauseImage: pauseRef}
	out := map[string]string{}
	for path, name := range map[string]string{
		"kubernetes/containerd.toml": "containerd.toml.tmpl",
		"kubernetes/kubelet.yaml":    "kubelet.yaml.tmpl",
		"kubernetes/kube-proxy.yaml": "kube-proxy.yaml.tmpl",
		"kubernetes/resolv.conf":     "resolv.conf.tmpl",
		"cni/net.d/10-lab.conflist":  "cni.conflist.tmpl",
	} {
		text, err := render(name, v)
		if err != nil {
			return nil, err
		}
		out[path] = text
	}
	return out, nil
}

// Addons returns the manifest of the addons of every cluster with nodes: CoreDNS.
func (p Plan) Addons() (string, error) {
	return render("coredns.yaml.tmpl", view{Cluster: p.Cluster, Options: p.Options, CoreDNSImage: CoreDNSImage})
}

func render(name string, v view) (string, error) {
	var out bytes.Buffer
	if err := templates.ExecuteTemplate(&out, name, v); err != nil {
		return "", fmt.Errorf("render %s: %w", strings.TrimSuffix(name, ".tmpl"), err)
	}
	return out.String(), nil
}
