;; A module for `margay ensemble load`: counters that one server alone is too slow for. Requests whose key begins with
;; "count:" go to the members in turns, so that each member has a part of the counter; the counter is the sum of its
;; parts. A member's part is asked for, or set, by the key with "@" and what the member is called: "count:hits@a". The
;; member is told the key without that. All other requests go where libketama's ring has them.
(module
  (import "margay" "ring" (func $ring (param i32 i32) (result i32)))
  (import "margay" "label" (func $label (param i32 i32 i32) (result i32)))
  (import "margay" "member_count" (func $member_count (result i32)))
  (import "margay" "member_at" (func $member_at (param i32) (result i32)))
  (import "margay" "keep" (func $keep (param i64)))
  (memory (export "memory") 1)
  ;; From 0 on: the frame, 2048 bytes. From 4096 on: a label.
  (data (i32.const 8192) "count:")
  ;; Whose turn is next.
  (global $turn (mut i32) (i32.const 0))

  (func (export "alrm_version") (result i32) (i32.const 1))
  (func (export "alrm_frame") (result i32) (i32.const 0))

  ;; A connection of another module, or of none, may come to this one: 1.
  (func (export "adopt") (param $len i32) (result i32) (i32.const 1))

  ;; Whether so many bytes are the same in two places.
  (func $same (param $a i32) (param $b i32) (param $len i32) (result i32)
    (loop $next
      (if (i32.eqz (local.get $len)) (then (return (i32.const 1))))
      (local.set $len (i32.sub (local.get $len) (i32.const 1)))
      (br_if $next (i32.eq
        (i32.load8_u (i32.add (local.get $a) (local.get $len)))
        (i32.load8_u (i32.add (local.get $b) (local.get $len))))))
    (i32.const 0))

  ;; The first place from here on with a byte that is no blank (of lines, too), if $blanks, or that is one.
  (func $skip (param $at i32) (param $len i32) (param $blanks i32) (result i32)
    (local $byte i32)
    (block $found
      (loop $next
        (br_if $found (i32.ge_u (local.get $at) (local.get $len)))
        (local.set $byte (i32.load8_u (local.get $at)))
        (br_if $found (i32.ne (i32.le_u (local.get $byte) (i32.const 32)) (local.get $blanks)))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (br $next)))
    (local.get $at))

  ;; The place of "@" in a key, or the key's end.
  (func $at_sign (param $at i32) (param $end i32) (result i32)
    (block $found
      (loop $next
        (br_if $found (i32.ge_u (local.get $at) (local.get $end)))
        (br_if $found (i32.eq (i32.load8_u (local.get $at)) (i32.const 64)))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (br $next)))
    (local.get $at))

  ;; The member that is called so; 255: there is none.
  (func $called (param $name i32) (param $len i32) (result i32)
    (local $looked i32)
    (local $member i32)
    (block $none
      (loop $next
        (br_if $none (i32.ge_u (local.get $looked) (call $member_count)))
        (local.set $member (call $member_at (local.get $looked)))
        (if (i32.eq (call $label (local.get $member) (i32.const 4096) (i32.const 256)) (local.get $len))
          (then (if (call $same (i32.const 4096) (local.get $name) (local.get $len))
            (then (return (local.get $member))))))
        (local.set $looked (i32.add (local.get $looked) (i32.const 1)))
        (br $next)))
    (i32.const 255))

  ;; Takes the bytes from $at to $end out of a request, and gives its new length.
  (func $cut (param $at i32) (param $end i32) (param $len i32) (result i32)
    (local $cut i32)
    (local.set $cut (i32.sub (local.get $end) (local.get $at)))
    (block $done
      (loop $next
        (br_if $done (i32.ge_u (local.get $end) (local.get $len)))
        (i32.store8 (local.get $at) (i32.load8_u (local.get $end)))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (local.set $end (i32.add (local.get $end) (i32.const 1)))
        (br $next)))
    (i32.sub (local.get $len) (local.get $cut)))

  (func (export "redirect") (param $id i32) (param $len i32) (param $source i32) (param $rtx i64) (result i64)
    (local $key i32)
    (local $end i32)
    (local $sign i32)
    (local $member i32)
    ;; The key is the second word.
    (local.set $key (call $skip
      (call $skip (i32.const 0) (local.get $len) (i32.const 0))
      (local.get $len) (i32.const 1)))
    (local.set $end (call $skip (local.get $key) (local.get $len) (i32.const 0)))
    (local.set $member
      (i32.and (call $ring (local.get $key) (i32.sub (local.get $end) (local.get $key))) (i32.const 255)))
    ;; A long request cannot be changed, and is no counter's.
    (if (i32.or
          (i32.gt_u (local.get $len) (i32.const 1024))
          (i32.le_u (i32.sub (local.get $end) (local.get $key)) (i32.const 6)))
      (then (return (i64.extend_i32_u (local.get $member)))))
    (if (i32.eqz (call $same (local.get $key) (i32.const 8192) (i32.const 6)))
      (then (return (i64.extend_i32_u (local.get $member)))))
    (local.set $sign (call $at_sign (local.get $key) (local.get $end)))
    (if (i32.lt_u (local.get $sign) (local.get $end))
      (then
        (local.set $member (call $called
          (i32.add (local.get $sign) (i32.const 1))
          (i32.sub (i32.sub (local.get $end) (local.get $sign)) (i32.const 1))))
        ;; Nobody is called so: the ring's member has no such key, and says so.
        (if (i32.eq (local.get $member) (i32.const 255))
          (then (return (i64.extend_i32_u
            (i32.and (call $ring (local.get $key) (i32.sub (local.get $end) (local.get $key))) (i32.const 255))))))
        (return (i64.or
          (i64.extend_i32_u (local.get $member))
          (i64.shl
            (i64.extend_i32_u (call $cut (local.get $sign) (local.get $end) (local.get $len)))
            (i64.const 32))))))
    (if (i32.eqz (call $member_count)) (then (return (i64.const 255))))
    ;; One that comes again keeps its member, and takes no turn.
    (if (i64.eqz (local.get $rtx))
      (then
        (global.set $turn (i32.add (global.get $turn) (i32.const 1)))
        (call $keep (i64.const 1))))
    (i64.extend_i32_u (call $member_at (i32.rem_u (global.get $turn) (call $member_count))))))
