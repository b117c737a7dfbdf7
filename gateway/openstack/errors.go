package openstack

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/gophercloud/gophercloud/v2"
)

// Errors that Neutron's refusals translate to. Any other error is a malfunction of the cloud, and may pass.
var (
	// ErrGone: the object does not exist, or belongs to another project; Neutron does not distinguish the two.
	ErrGone = errors.New("no such object in this project")
	// ErrQuota: the quota of the project is exhausted.
	ErrQuota = errors.New("the project's quota is exhausted")
	// ErrStale: the object was changed since it was read.
	ErrStale = errors.New("the object was changed meanwhile")
	// ErrTaken: an address, or the target of a floating IP, is in use.
	ErrTaken = errors.New("it is in use")
	// ErrPairs: the port has the maximum of allowed address pairs.
	ErrPairs = errors.New("the port may have no more allowed address pairs (Neutron's max_allowed_address_pair)")
	// ErrForbidden: the credentials do not allow the request; a retry does not help.
	ErrForbidden = errors.New("the credentials do not allow it")
	// ErrCredentials: the credentials are refused, despite a new token. No request succeeds until they are replaced.
	ErrCredentials = errors.New("the credentials are refused: they have expired, were revoked, or an access rule forbids the request")
	// ErrInvalid: Neutron cannot process the request, in general or in this network.
	ErrInvalid = errors.New("refused as invalid")
)

// byType maps error types that say more than the status code: an exhausted quota is also a conflict.
var byType = map[string]error{
	"OverQuota":                            ErrQuota,
	"AllowedAddressPairExhausted":          ErrPairs,
	"IpAddressAlreadyAllocated":            ErrTaken,
	"IpAddressGenerationFailure":           ErrQuota, // the subnet has no free address
	"ExternalIpAddressExhausted":           ErrQuota,
	"FloatingIPPortAlreadyAssociated":      ErrTaken,
	"RevisionNumberConstraintFailed":       ErrStale,
	"NetworkNotFound":                      ErrGone,
	"ExternalGatewayForFloatingIPNotFound": ErrInvalid, // no router joins the port's subnet with the floating network
}

var byStatus = map[int]error{
	http.StatusBadRequest:         ErrInvalid,
	http.StatusUnauthorized:       ErrCredentials,
	http.StatusForbidden:          ErrForbidden,
	http.StatusNotFound:           ErrGone,
	http.StatusConflict:           ErrTaken,
	http.StatusPreconditionFailed: ErrStale,
}

// loginError is a failure to get the first token of a session.
type loginError struct {
	at  string
	err error
}

func (l *loginError) Error() string { return "authenticate at " + l.at + ": " + l.err.Error() }

func (l *loginError) Unwrap() error { return l.err }

// refusal returns the response behind an error, if the cloud refused a request.
func refusal(err error) (r gophercloud.ErrUnexpectedResponseCode, ok bool) {
	if again, ok := errors.AsType[*gophercloud.ErrUnableToReauthenticate](err); ok { // it does not unwrap
		err = again.ErrReauth
	}
	return errors.AsType[gophercloud.ErrUnexpectedResponseCode](err)
}

// refusesCredentials reports whether a new token might help: Keystone issued none, or Neutron refuses the one it issued.
func refusesCredentials(err error) bool {
	_, token := errors.AsType[*gophercloud.ErrUnableToReauthenticate](err)
	r, ok := refusal(err)
	return token || ok && r.Actual == http.StatusUnauthorized
}

// longestPause bounds the pause that a response can ask for.
const longestPause = 10 * time.Minute

// retryAfter returns the end of the pause that an overloaded service asks for, in seconds or as a date (RFC 9110).
func retryAfter(err error, now time.Time) (until time.Time, ok bool) {
	r, ok := refusal(err)
	if !ok || r.Actual != http.StatusTooManyRequests && r.Actual != http.StatusServiceUnavailable {
		return time.Time{}, false
	}
	text := r.ResponseHeader.Get("Retry-After")
	if seconds, err := strconv.ParseUint(text, 10, 31); err == nil {
		until = now.Add(time.Duration(seconds) * time.Second)
	} else if until, err = http.ParseTime(text); err != nil {
		return time.Time{}, false
	}
	if last := now.Add(longestPause); until.After(last) {
		until = last
	}
	return until, until.After(now)
}

// explain wraps an error of the cloud in one of ours.
func explain(err error) error {
	if p, ok := errors.AsType[*Paused](err); ok {
		return p
	}
	if l, ok := errors.AsType[*loginError](err); ok {
		return fmt.Errorf("authenticate at %s: %w", l.at, explain(l.err))
	}
	refused, ok := refusal(err)
	if !ok {
		return err
	}
	kind, text := neutronError(refused.Body)
	meaning, ok := byType[kind]
	if !ok {
		meaning, ok = byStatus[refused.Actual]
	}
	if text == "" {
		text = http.StatusText(refused.Actual)
	}
	if !ok {
		return fmt.Errorf("status %d: %s", refused.Actual, text)
	}
	return fmt.Errorf("%w: %s", meaning, text)
}

// neutronError returns the type and the text of an error response.
func neutronError(body []byte) (kind, text string) {
	var neutron struct {
		NeutronError struct{ Type, Message, Detail string }
		Error        struct{ Title, Message string } // Keystone's
	}
	if json.Unmarshal(body, &neutron) != nil {
		return "", ""
	}
	if neutron.Error.Message != "" {
		return neutron.Error.Title, neutron.Error.Message
	}
	return neutron.NeutronError.Type, neutron.NeutronError.Message
}
