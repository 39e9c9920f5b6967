BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79573069214980173113e+09,'policy.loaded',NULL,NULL,'{"digest":"32a030eb4b7c","files":["/tmp/mpsbmbnl7hh4/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79573069223506712917e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1.79573069235246229177e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 10457 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(4,1.79573069235294651988e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.79573069236497974399e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79573069259382176398e+09,'gate.connected',NULL,10448,'{}');
INSERT INTO "records" VALUES(7,1.7957306925980422497e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 10457","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79573069259962677952e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":7,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 10457","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79573069296670722967e+09,'client.waiting',20001,10469,'{"connection":4142990539}');
INSERT INTO "records" VALUES(10,1.7957306929678008556e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795730692.978,'server.starting',20001,10471,'{}');
INSERT INTO "records" VALUES(12,1795730693.141,'server.ready',20001,10471,'{}');
INSERT INTO "records" VALUES(13,1.79573069314908599853e+09,'limits.verified',20001,NULL,'{"reason":"server 10471 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":10471}');
INSERT INTO "records" VALUES(14,1.79573069314902329443e+09,'client.connected',20001,10469,'{"waited":0.18231606483459473,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.1765425205230713}');
INSERT INTO "records" VALUES(15,1.79573069447796607013e+09,'client.waiting',20002,10483,'{"connection":4144501798}');
INSERT INTO "records" VALUES(16,1.79573069455473852164e+09,'client.ended',20001,10469,'{"server":10471,"outcome":"ok","seconds":1.4057152271270752,"waited":0.18231606483459473}');
INSERT INTO "records" VALUES(17,1.79573069455872154232e+09,'turn.ended',20001,NULL,'{"seconds":1.5909206867218018,"forced":false}');
INSERT INTO "records" VALUES(18,1795730694.5611,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 10471 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":10471,"force":false}');
INSERT INTO "records" VALUES(19,1.79573069456166410444e+09,'client.used',20001,10469,'{"seconds":1.406,"busy":0.0,"energy":140.6,"shared":false,"over":true}');
INSERT INTO "records" VALUES(20,1.79573069456555414204e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":18,"ok":true,"text":"","reason":"the last client of server 10471 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":10471,"force":false}');
INSERT INTO "records" VALUES(21,1795730694.619,'server.ended',20001,10471,'{"status":0}');
INSERT INTO "records" VALUES(22,1.79573069461955142018e+09,'turn.began',20002,NULL,'{"gap":0.060829877853393555}');
INSERT INTO "records" VALUES(23,1795730694.63,'server.starting',20002,10489,'{}');
INSERT INTO "records" VALUES(24,1795730694.785,'server.ready',20002,10489,'{}');
INSERT INTO "records" VALUES(25,1.79573069479303717606e+09,'limits.verified',20002,NULL,'{"reason":"server 10489 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":10489}');
INSERT INTO "records" VALUES(26,1.79573069479296350478e+09,'client.connected',20002,10483,'{"waited":0.31499743461608887,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.16778063774108887}');
INSERT INTO "records" VALUES(27,1.79573069609145331382e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821650696.0914533,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79573069610215163235e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1.79573069610229301448e+09,'drain.begun',NULL,NULL,'{"reason":"no new client is let in; clients at work go on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,10469,1.79573069296670722967e+09,1.79573069314902329443e+09,1.79573069455473852164e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.406,"busy":0.0,"energy":140.6,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.7957306929678008556e+09,1.7957306929678008556e+09,1.79573069455872154232e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,10483,1.79573069447796607013e+09,1.79573069479296350478e+09,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.79573069461955142018e+09,1.79573069461955142018e+09,NULL,NULL,NULL,NULL,'{"gap":0.060829877853393555,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
