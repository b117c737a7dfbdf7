package apiserver

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
)

// Etcd describes one etcd, the only member of its cluster.
type Etcd struct {
	Name, DataDir string
	Client, Peer  netip.AddrPort // addresses to listen on, without TLS
	// NoFsync keeps etcd from waiting for the disk. A crash of the machine may then lose data; a crash of etcd does not.
	NoFsync bool
}

// URL is where the API server reaches etcd.
func (e Etcd) URL() string { return "http://" + e.Client.String() }

// Flags are the flags of the etcd command.
func (e Etcd) Flags() []string {
	client, peer := e.URL(), "http://"+e.Peer.String()
	flags := []string{
		"--name=" + e.Name, "--data-dir=" + e.DataDir,
		"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=" + e.Name + "=" + peer,
		"--log-level=warn",
	}
	if e.NoFsync {
		flags = append(flags, "--unsafe-no-fsync")
	}
	return flags
}

// Flags describes the command line of a kube-apiserver.
type Flags struct {
	Etcd         string // URL
	Advertise    netip.Addr
	Port         uint16
	ServiceCIDRs []netip.Prefix
	// PKI is a folder with the files of [pki.Server].
	PKI string
	// ClientCA is the file of the authority of client certificates; "" accepts none, which spares the server three inotify
	// instances.
	ClientCA string
	// Issuer is the issuer of ServiceAccount tokens.
	Issuer string
	// Authorization is a list of modes, such as "RBAC".
	Authorization string
	// More are appended.
	More []string
}

// List returns the flags of the kube-apiserver command.
func (f Flags) List() []string {
	var cidrs []string
	for _, c := range f.ServiceCIDRs {
		cidrs = append(cidrs, c.String())
	}
	flags := []string{
		"--etcd-servers=" + f.Etcd,
		"--advertise-address=" + f.Advertise.String(),
		"--secure-port=" + strconv.Itoa(int(f.Port)),
		"--service-cluster-ip-range=" + strings.Join(cidrs, ","),
		"--allow-privileged=true",
		"--authorization-mode=" + f.Authorization,
	}
	if f.ClientCA != "" {
		flags = append(flags, "--client-ca-file="+f.ClientCA)
	}
	return slices.Concat(flags, []string{
		"--tls-cert-file=" + pki.File(f.PKI, pki.Server+".crt"),
		"--tls-private-key-file=" + pki.File(f.PKI, pki.Server+".key"),
		"--service-account-issuer=" + f.Issuer,
		"--service-account-key-file=" + pki.File(f.PKI, pki.ServiceAccount),
		"--service-account-signing-key-file=" + pki.File(f.PKI, pki.ServiceAccountKey),
		"--profiling=false",
	}, f.More)
}
