package signal

import "testing"

// pending takes the notification of s, if there is one.
func pending(s Signal) bool {
	select {
	case <-s.C():
		return true
	default:
		return false
	}
}

func TestSignalCoalescesNotifications(t *testing.T) {
	t.Parallel()
	s := New()
	if pending(s) {
		t.Error("a new signal has a notification pending")
	}
	s.Notify()
	s.Notify()
	if !pending(s) {
		t.Error("two notifications left none pending")
	}
	if pending(s) {
		t.Error("two notifications were delivered as two")
	}
}

func TestSignalKeepsNotificationAfterReceive(t *testing.T) {
	t.Parallel()
	s := New()
	s.Notify()
	<-s.C()
	s.Notify()
	if !pending(s) {
		t.Error("a notification after a receive was lost")
	}
}

func TestSignalCopiesShareNotification(t *testing.T) {
	t.Parallel()
	s := New()
	c := s
	c.Notify()
	if !pending(s) {
		t.Error("the notification of a copy did not arrive")
	}
}
