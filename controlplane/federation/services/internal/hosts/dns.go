package hosts

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// timeout limits the time for one response of a name server.
const timeout = 3 * time.Second

// System returns a Query that uses the name servers of a file such as /etc/resolv.conf, which it reads each time. The
// standard library's resolver does not return TTLs. A host is a full name: search domains do not apply.
func System(resolvConf string) Query {
	return func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
		servers, err := nameServers(resolvConf)
		if err != nil {
			return nil, 0, err
		}
		var errs []error
		for _, server := range servers {
			addrs, ttl, err := resolve(ctx, server, host)
			if err == nil {
				return addrs, ttl, nil
			}
			errs = append(errs, fmt.Errorf("query %s for %s: %w", server, host, err))
		}
		return nil, 0, errors.Join(errs...)
	}
}

// nameServers returns the name servers of a file, at least one.
func nameServers(path string) ([]netip.AddrPort, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var servers []netip.AddrPort
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if at, err := netip.ParseAddrPort(fields[1]); err == nil {
			servers = append(servers, at)
		} else if a, err := netip.ParseAddr(fields[1]); err == nil {
			servers = append(servers, netip.AddrPortFrom(a, 53))
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(servers) == 0 {
		return nil, fmt.Errorf("%s has no nameserver", path)
	}
	return servers, nil
}

// resolve returns the addresses of both families, and the lowest TTL of all records of the responses.
func resolve(ctx context.Context, server netip.AddrPort, host string) ([]netip.Addr, time.Duration, error) {
	var all []netip.Addr
	ttl := longest
	for _, t := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		answer, err := ask(ctx, server, host, t)
		if err != nil {
			return nil, 0, err
		}
		for _, r := range answer {
			ttl = min(ttl, time.Duration(r.Header.TTL)*time.Second)
			switch body := r.Body.(type) {
			case *dnsmessage.AResource:
				all = append(all, netip.AddrFrom4(body.A))
			case *dnsmessage.AAAAResource:
				all = append(all, netip.AddrFrom16(body.AAAA))
			}
		}
	}
	return all, ttl, nil
}

// ask sends one question, by UDP and, if the response is truncated, by TCP. A name that does not exist has no records.
func ask(ctx context.Context, server netip.AddrPort, host string, t dnsmessage.Type) ([]dnsmessage.Resource, error) {
	name, err := dnsmessage.NewName(strings.TrimSuffix(host, ".") + ".")
	if err != nil {
		return nil, fmt.Errorf("host name %q: %w", host, err)
	}
	var id [2]byte
	rand.Read(id[:]) // never fails; a forged response has to guess it, and the port
	question := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: binary.BigEndian.Uint16(id[:]), RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: name, Type: t, Class: dnsmessage.ClassINET}},
	}
	query, err := question.Pack()
	if err != nil {
		return nil, fmt.Errorf("host name %q: %w", host, err)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for _, network := range []string{"udp", "tcp"} {
		answer, err := exchange(ctx, network, server, question, query)
		switch {
		case err != nil:
			return nil, err
		case answer.Truncated && network == "udp":
			continue
		case answer.RCode != dnsmessage.RCodeSuccess && answer.RCode != dnsmessage.RCodeNameError:
			return nil, fmt.Errorf("the response is %s", answer.RCode)
		}
		return answer.Answers, nil
	}
	return nil, errors.New("the response is truncated")
}

// exchange sends a query and returns its response.
func exchange(ctx context.Context, network string, server netip.AddrPort, question dnsmessage.Message, query []byte) (answer dnsmessage.Message, err error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, network, server.String())
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return answer, err
		}
	}
	if network == "tcp" {
		query = append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...) // RFC 1035, section 4.2.2
	}
	if _, err := conn.Write(query); err != nil {
		return answer, err
	}
	buf := make([]byte, 1<<16)
	for {
		n, err := receive(conn, network, buf)
		if err != nil {
			return answer, err
		}
		answer = dnsmessage.Message{}
		if answer.Unpack(buf[:n]) == nil && answer.Response && answer.ID == question.ID &&
			len(answer.Questions) == 1 && strings.EqualFold(answer.Questions[0].Name.String(), question.Questions[0].Name.String()) {
			return answer, nil
		}
		if network == "tcp" {
			return answer, errors.New("the response is to another question")
		}
	}
}

// receive reads one message.
func receive(conn net.Conn, network string, buf []byte) (int, error) {
	if network == "udp" {
		return conn.Read(buf)
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return 0, err
	}
	return io.ReadFull(conn, buf[:binary.BigEndian.Uint16(length[:])])
}
