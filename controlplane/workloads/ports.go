package workloads

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
)

// port is a port of a Service and the port of a machine that serves it.
type port struct {
	name     string
	number   int32
	protocol corev1.Protocol
	target   int32
}

// newPort returns a port. Without a name it is named after its protocol and number.
func newPort(name string, number int32, protocol corev1.Protocol, target int32) port {
	protocol = cmp.Or(protocol, corev1.ProtocolTCP)
	return port{cmp.Or(name, fmt.Sprintf("%s-%d", strings.ToLower(string(protocol)), number)), number, protocol, target}
}

// is reports whether p and q are the same port to clients.
func (p port) is(q port) bool { return p.number == q.number && p.protocol == q.protocol }

// String returns p as parsePorts reads it.
func (p port) String() string {
	return fmt.Sprintf("%s:%d/%s=%d", p.name, p.number, p.protocol, p.target)
}

// servicePort returns p as the API server stores it.
func (p port) servicePort() corev1.ServicePort {
	return corev1.ServicePort{Name: p.name, Protocol: p.protocol, Port: p.number, TargetPort: intstr.FromInt32(p.number)}
}

// parsePorts parses a comma-separated list of [NAME:]PORT[/PROTOCOL][=TARGET], such as 80, http:80=8080,dns:53/UDP.
func parsePorts(text string) ([]port, error) {
	var all []port
	for word := range strings.SplitSeq(text, ",") {
		p, err := parsePort(strings.TrimSpace(word))
		if err != nil {
			return nil, err
		}
		for _, q := range all {
			if p.is(q) || p.name == q.name {
				return nil, fmt.Errorf("ports %s and %s have the same name or number; make them different", q, p)
			}
		}
		all = append(all, p)
	}
	return all, nil
}

// listenerPorts returns the ports of a load balancer's listeners, sorted by number, and the reason for each listener that is left
// out. A listener whose name cannot name a port, or that of another one, has a port named after its protocol and number.
func listenerPorts(listeners []Listener) (ports []port, refused []string) {
	if len(listeners) == 0 {
		return nil, []string{"no listener of it is in use, so it has no endpoint; create a TCP or UDP listener"}
	}
	listeners = slices.SortedFunc(slices.Values(listeners), func(a, b Listener) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol), strings.Compare(a.Name, b.Name))
	})
	for _, l := range listeners {
		name, protocol := l.Name, corev1.Protocol(l.Protocol)
		taken := func(p port) bool { return p.name == name }
		if len(validation.IsDNS1123Label(name)) > 0 || slices.ContainsFunc(ports, taken) {
			name = ""
		}
		p := newPort(name, int32(l.Port), protocol, int32(l.Port))
		name = p.name
		switch {
		case protocol != corev1.ProtocolTCP && protocol != corev1.ProtocolUDP:
			refused = append(refused, fmt.Sprintf("listener %q is left out: its protocol is %s, and only TCP and UDP are forwarded; use one of them", l.Name, l.Protocol))
		case l.Port < 1 || l.Port > 65535:
			refused = append(refused, fmt.Sprintf("listener %q is left out: %d is not a port from 1 to 65535; choose another", l.Name, l.Port))
		case slices.ContainsFunc(ports, p.is) || slices.ContainsFunc(ports, taken):
			refused = append(refused, fmt.Sprintf("listener %q is left out: another one has the name %s or the number %d; make them different", l.Name, p.name, l.Port))
		default:
			ports = append(ports, p)
		}
	}
	return ports, refused
}

func parsePort(word string) (port, error) {
	const hint = "write [NAME:]PORT[/PROTOCOL][=TARGET], such as http:80/TCP=8080"
	rest, target, mapped := strings.Cut(word, "=")
	rest, protocol, _ := strings.Cut(rest, "/")
	name, number, named := strings.Cut(rest, ":")
	if !named {
		name, number = "", rest
	}
	if !mapped {
		target = number
	}
	if faults := validation.IsDNS1123Label(name); named && len(faults) > 0 {
		return port{}, fmt.Errorf("%q: %q is not a name of a port; %s", word, name, hint)
	}
	var numbers [2]int32
	for i, digits := range []string{number, target} {
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || n == 0 {
			return port{}, fmt.Errorf("%q: %q is not a port from 1 to 65535; %s", word, digits, hint)
		}
		numbers[i] = int32(n)
	}
	switch upper := corev1.Protocol(strings.ToUpper(protocol)); upper {
	case "", corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP:
		return newPort(name, numbers[0], upper, numbers[1]), nil
	default:
		return port{}, fmt.Errorf("%q: protocol %q is not TCP, UDP or SCTP; %s", word, protocol, hint)
	}
}
