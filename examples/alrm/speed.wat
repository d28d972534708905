;; A module for `margay ensemble load`: each request goes to the member that is likely to answer it first, for servers
;; that all have the same. A member costs its round trip, times what it has not acknowledged and this request. One whose
;; round trip nobody knows costs nothing, so that it is soon known; of members that cost the same the next one is taken.
(module
  (import "margay" "member_count" (func $member_count (result i32)))
  (import "margay" "member_at" (func $member_at (param i32) (result i32)))
  (import "margay" "in_flight" (func $in_flight (param i32) (result i32)))
  (import "margay" "round_trip_us" (func $round_trip_us (param i32) (result i32)))
  (memory (export "memory") 1)
  ;; Where the next look begins, so that equal members have turns.
  (global $turn (mut i32) (i32.const 0))

  (func (export "alrm_version") (result i32) (i32.const 1))
  (func (export "alrm_frame") (result i32) (i32.const 0))

  ;; A connection of another module, or of none, may come to this one: 1.
  (func (export "adopt") (param $len i32) (result i32) (i32.const 1))

  (func $cost (param $member i32) (result i64)
    (local $round_trip i32)
    (local.set $round_trip (call $round_trip_us (local.get $member)))
    (if (i32.lt_s (local.get $round_trip) (i32.const 0)) (then (return (i64.const 0))))
    (i64.mul
      (i64.extend_i32_u (local.get $round_trip))
      (i64.add (i64.extend_i32_u (call $in_flight (local.get $member))) (i64.const 1))))

  (func (export "redirect") (param $id i32) (param $len i32) (param $source i32) (param $rtx i64) (result i64)
    (local $count i32)
    (local $looked i32)
    (local $member i32)
    (local $cost i64)
    ;; 255: nobody.
    (local $best i32)
    (local $least i64)
    (local.set $best (i32.const 255))
    (local.set $least (i64.const 0x7fffffffffffffff))
    (local.set $count (call $member_count))
    (block $done
      (loop $next
        (br_if $done (i32.ge_u (local.get $looked) (local.get $count)))
        (local.set $member (call $member_at
          (i32.rem_u (i32.add (global.get $turn) (local.get $looked)) (local.get $count))))
        (local.set $cost (call $cost (local.get $member)))
        (if (i64.lt_u (local.get $cost) (local.get $least))
          (then
            (local.set $least (local.get $cost))
            (local.set $best (local.get $member))))
        (local.set $looked (i32.add (local.get $looked) (i32.const 1)))
        (br $next)))
    (global.set $turn (i32.add (global.get $turn) (i32.const 1)))
    (i64.extend_i32_u (local.get $best))))
