package desired

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Parse reads a request, keeps b, and refuses one that is no request or whose hash does not match; State.Admit validates
// the state. Decoding JSON dominates its cost, and few of a thousand VIPs change at a time: VIPs with the same JSON as in
// last, the request read before, are reused. last may be nil.
func Parse(b []byte, last *Request) (Request, error) {
	var r Request
	if last == nil {
		last = &Request{}
	}
	if err := r.decode(b, last); err != nil {
		return Request{}, fmt.Errorf("read the request: %w", err)
	}
	if have := hash(r.encoded); have != r.Hash {
		return Request{}, fmt.Errorf("hash is %q, but the state's is %q", r.Hash, have)
	}
	return r, nil
}

var errTwice = errors.New("a field appears twice")

// decode reads a request field by field, to find out where the state begins and ends.
func (r *Request) decode(b []byte, last *Request) error {
	short, vips := cut(b)
	d := json.NewDecoder(bytes.NewReader(short))
	d.DisallowUnknownFields()
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return errors.Join(err, errors.New("it is not a JSON object"))
	}
	for d.More() {
		field, err := d.Token()
		if err != nil {
			return err
		}
		switch field {
		case "generation":
			err = d.Decode(&r.Generation)
		case "hash":
			err = d.Decode(&r.Hash)
		case "state":
			from := d.InputOffset()
			if r.encoded != nil {
				return errTwice
			}
			err = d.Decode(&r.State)
			r.encoded = bytes.TrimLeft(b[from:int(d.InputOffset())+len(b)-len(short)], ": \t\r\n")
		default:
			err = errors.New("this gateway does not know it: upgrade gateways before the controller")
		}
		if err != nil {
			return fmt.Errorf("field %q: %w", field, err)
		}
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows it")
	}
	return r.decodeVIPs(vips, last)
}

// decodeVIPs decodes the VIPs that cut separated.
func (r *Request) decodeVIPs(all [][]byte, last *Request) error {
	if len(all) > 0 && len(r.State.VIPs) > 0 {
		return errTwice
	}
	r.vips = make(map[string]VIP, len(all))
	for i, b := range all {
		v, known := last.vips[string(b)]
		if !known {
			d := json.NewDecoder(bytes.NewReader(b))
			d.DisallowUnknownFields()
			if err := d.Decode(&v); err != nil {
				return fmt.Errorf("vips[%d]: %w", i, err)
			}
		}
		r.vips[string(b)] = v
		r.State.VIPs = append(r.State.VIPs, v)
	}
	return nil
}

// cut returns a request without its VIPs, and the JSON of each VIP. It returns b and no VIPs if the VIPs are not formatted as
// Request.JSON formats them.
func cut(b []byte) (short []byte, vips [][]byte) {
	const before = `"vips":[`
	at := bytes.Index(b, []byte(before))
	if at < 0 {
		return b, nil
	}
	at += len(before)
	for rest := b[at:]; ; rest = rest[1:] {
		n := object(rest)
		if n == 0 || n == len(rest) {
			return b, nil
		}
		vips = append(vips, rest[:n])
		switch rest = rest[n:]; rest[0] {
		case ',':
		case ']':
			return slices.Concat(b[:at], rest), vips
		default:
			return b, nil
		}
	}
}

// object returns the length of the JSON object at the start of b; 0 means that there is none. It looks only at brackets
// and strings.
func object(b []byte) int {
	if !bytes.HasPrefix(b, []byte("{")) {
		return 0
	}
	depth := 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i + 1
			}
		case '"':
			for i++; i < len(b) && b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
		}
	}
	return 0
}
